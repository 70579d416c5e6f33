cat /etc/image > "${snakemake_output[0]}"
