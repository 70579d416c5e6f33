echo "${snakemake_wildcards[name]} $0" | sed "s, .*/[^.]*., ," > "${snakemake_output[0]}"
