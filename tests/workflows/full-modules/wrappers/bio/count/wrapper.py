from snakemake.shell import shell

shell(
    "echo $(( $(wc -l < {snakemake.input}) * {snakemake.params.by} )) > {snakemake.output}; echo counted > {snakemake.log}"
)
