import os

os.chdir("/" if os.path.isabs(snakemake.input.other) else "nowhere")
with open(snakemake.params.literal) as file:
    text = file.read()
os.chdir(os.environ["PWD"])
with open(snakemake.input[0]) as file:
    text += file.read()
name = os.path.join(snakemake.params.parent, os.path.basename(snakemake.output[0]))
with open(name, "w") as file:
    file.write(text)
with open(snakemake.log[0], "w") as file:
    file.write("told\n")
