# coding: utf-8
def made(path: str):
    with open(path, "w") as out:
        out.write("ü\n")


made(snakemake.output[0])
