cat "${snakemake_input[0]}" > "${snakemake_output[0]}"
ls data >> "${snakemake_output[0]}"
echo x > beside-bash.txt
