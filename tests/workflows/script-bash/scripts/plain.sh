echo "${snakemake_wildcards[name]}" > "${snakemake_output[0]}"
