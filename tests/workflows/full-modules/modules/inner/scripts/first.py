from snakemake.utils import simplify_path  # only to be had of Snakemake: a nested Snakemake
from beside import mark

with open(snakemake.input[0]) as source, open(snakemake.output[0], "w") as file:
    file.write(mark(source.read()) + snakemake.config["name"] + "\n")
