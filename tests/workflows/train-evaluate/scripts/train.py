import json
import os

rate = snakemake.params.rate
weight = float(snakemake.wildcards.seed)
os.makedirs(snakemake.output.steps)
with open(snakemake.input[0]) as rows:
    data = [tuple(map(float, row.split(","))) for row in rows]
with open(snakemake.log[0], "w") as log:
    for step in range(5):
        gradient = sum(x * (weight * x + 1 - y) for x, y in data) / sum(x * x for x, _ in data)
        weight -= rate * gradient
        print(step, round(weight, 6), file=log)
        with open(os.path.join(snakemake.output.steps, f"{step}.txt"), "w") as file:
            file.write(f"{weight:.6f}\n")
with open(snakemake.output.model, "w") as file:
    json.dump({"weight": round(weight, 6), "threads": snakemake.threads}, file)
