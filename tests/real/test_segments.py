"""The warning before the end of a walltime reaches steps of `srun` and containers, on Slurm."""

from pathlib import Path

import pytest

from tests.real import apptainer
from tests.support.workflows import UNTRACKED, Project

pytestmark = pytest.mark.software("Apptainer")

TRAIN = """\
me=$1 state=ckpt-$2/$1
note() { echo "$MANTIK_SEGMENT $*" >> "notes-$me"; }
if [ -e "$state" ]; then
  note found "$(cat "$state")"
  exit 0
fi
trap 'note warned; sleep 2; echo all > "$state.new"; mv "$state.new" "$state"; note saved' USR1
trap 'note over; exit 143' TERM
note began
while :; do sleep 0.2; done
"""
"""Handles both signals, and takes some time to write its checkpoint."""

SNAKEFILE = """
    rule all:
        input: "steps.txt", "inside.txt", "boxed.txt"

    rule steps:
        input: "train.sh"
        output: "steps.txt"
        resources:
            tasks=2, mpi="srun", mantik_continue=2, mantik_checkpoint="ckpt-steps/",
            mantik_warn="30s"
        shell:
            # Neither this shell nor that of each step handles USR1.
            "{resources.mpi} -n {resources.tasks} bash -c"
            " 'bash {input} steps-$SLURM_PROCID steps && echo $SLURM_PROCID'; touch {output}"

    rule inside:
        input: "train.sh"
        output: "inside.txt"
        container: "small.sif"
        resources: mantik_continue=2, mantik_checkpoint="ckpt-inside/", mantik_warn="30s"
        shell: "bash {input} inside inside && touch {output}"

    rule boxed:
        input: "train.sh"
        output: "boxed.txt"
        resources:
            mantik_site="boxes", mantik_continue=2, mantik_checkpoint="ckpt-boxed/",
            mantik_warn="30s"
        shell: "bash {input} boxed boxed && touch {output}"
"""


def test_srun_and_containers_are_warned(project: Project, image_root: Path) -> None:
    """Each writes its checkpoint after USR1, gets TERM later, and goes on in the next segment."""
    image = apptainer.build(image_root, project.directory / "small.sif")
    variables = "Environment:\n  Variables: {APPTAINER_USERNS: '1'}\n"
    text = project.place.config
    assert "Resources:\n" in text
    text = text.replace("Resources:\n", "Resources:\n  Runtime: 60s\n") + variables
    project.config.write_text(text)
    boxes = project.config.with_name("boxes.yaml")
    box = f"  Apptainer: {{Path: {image}, Type: remote, Options: --pid}}\n"
    boxes.write_text(text + box)
    project.sites.append(f"boxes={boxes}")
    known = f"MANTIK_{project.place.name.upper()}_"
    credentials = {k: v for k, v in project.place.environment.items() if k.startswith(known)}
    project.extra |= {k.replace(known, "MANTIK_BOXES_"): v for k, v in credentials.items()}
    project.extra |= UNTRACKED
    project.write("train.sh", TRAIN)
    project.write("Snakefile", SNAKEFILE)

    said = project.run("--mantik-software-deployment", "apptainer").ok().output

    whole = ["0 began", "0 warned", "0 saved", "0 over", "1 found all"]
    for name in ("steps-0", "steps-1", "inside", "boxed"):
        notes = (project.workspace / f"notes-{name}").read_text().splitlines()
        assert notes == whole, f"{name}: {notes}\n{said}"
