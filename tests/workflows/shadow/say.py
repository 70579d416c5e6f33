import os
import shutil

print(sorted(n for n in os.listdir() if n[0] != "."), file=open(snakemake.log[0], "w"))
with open(snakemake.output[0], "w") as out:
    print(open(snakemake.input[0]).read(), snakemake.params.deep, os.path.basename(__file__), file=out)
shutil.copy(snakemake.output[0], "beside-script.txt")
