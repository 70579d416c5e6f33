cat "${snakemake_input[0]}" > "${snakemake_output[0]}"
cd /
cat "${snakemake_input[other]}" >> "${snakemake_output[0]}"
