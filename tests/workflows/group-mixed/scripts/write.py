with open(snakemake.output[0], "w") as file:
    file.write(" ".join(snakemake.params.words) + "\n")
