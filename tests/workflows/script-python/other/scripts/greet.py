from pathlib import Path

from helping import shout

Path(snakemake.output[0]).write_text(shout(snakemake.config["greeting"]))
