tool > "${snakemake_output[0]}"
