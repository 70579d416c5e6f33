with open("times.txt", "w" if snakemake.bench_iteration == 0 else "a") as out:
    print(snakemake.bench_iteration, file=out)
