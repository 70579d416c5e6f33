file.copy(snakemake@input[[1]], snakemake@output[[1]])
