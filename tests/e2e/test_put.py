"""Files that are sent to a site before a job needs them: `smk-mantik put`."""

import hashlib
import shutil
from pathlib import Path

import pytest

from tests.support.command import smk_mantik
from tests.support.workflows import FILES_STAY, UNTRACKED, Project, tells, until

WORKFLOW = """
    localrules: all

    rule all:
        input: "sum.txt"

    rule sum:
        input: "data/set", "large.bin"
        output: "sum.txt"
        shell: "cat {input[0]}/*.txt > {output}; sha256sum < {input[1]} >> {output}"

    rule other:
        output: "made/other.txt"
        shell: "until [ ! -e wait ]; do sleep 0.1; done; touch {output}"
"""
REPORTED_BYTES = 64 << 20
"""From this size on, a run reports an upload."""


@pytest.fixture
def inputs(project: Project) -> Project:
    project.extra |= UNTRACKED
    project.write("Snakefile", WORKFLOW)
    for name in "ab":
        project.write(f"data/set/{name}.txt", f"{name}\n")
    with project.write("large.bin").open("wb") as file:
        file.truncate(REPORTED_BYTES)
    return project


def kept(project: Project) -> list[Path]:
    """Return the bundles that no job has unpacked."""
    return sorted((project.workspace / ".mantik/bundles/kept").glob("*.tar.gz"))


def put(project: Project, *words: str) -> str:
    return smk_mantik(project, "put", *words).ok().output


@pytest.mark.parametrize(
    "options", [(), pytest.param(FILES_STAY, marks=pytest.mark.nightly)], ids=["plain", "stay"]
)
def test_what_was_put_is_not_uploaded_again(inputs: Project, options: tuple[str, ...]) -> None:
    name = inputs.place.name
    said = put(inputs, "data/set", "large.bin", "--site", str(inputs.config))
    tells(said, f"Sent 3 files, 64.0 MiB, to {name}.", "Sending large.bin (64.0 MiB)")
    [large] = [path for path in kept(inputs) if path.is_dir()]

    inputs.run(*options, "other").ok()
    assert kept(inputs) == [large], "sources were unpacked, and nothing that waits is removed"
    tells(put(inputs, "data", "large.bin"), f"Sent 0 files, 0 B, to {name}; 3 were there.")
    shutil.rmtree(large)
    tells(put(inputs, "data", "large.bin"), "Sent 1 file, 64.0 MiB", "2 were there")  # purged
    plan = ["plan", *options, "--mantik-backend-config", str(inputs.config), "--", "sum.txt"]
    tells(smk_mantik(inputs, *plan).ok().output, "0 to upload")
    said = inputs.run(*options).ok().output

    assert "Sending" not in said
    if options:
        smk_mantik(inputs, "get", "sum.txt").ok()
    digest = hashlib.sha256(bytes(REPORTED_BYTES)).hexdigest()
    assert inputs.read("sum.txt") == f"a\nb\n{digest}  -\n"
    assert not kept(inputs), "unpacked"
    assert inputs.read("data/set/a.txt") == "a\n"
    tells(put(inputs, "data/set"), "Sent 0 files", "2 were there")

    inputs.write("data/set/a.txt", "another\n")
    tells(put(inputs, "data/set"), "Sent 1 file, 8 B", "1 was there")
    inputs.write("data/set/a.txt", "a third\n")
    inputs.run(*options, "--forcerun", "sum").ok()
    if options:
        smk_mantik(inputs, "get", "sum.txt", "--force").ok()
    assert inputs.read("sum.txt").startswith("a third\nb\n")


def test_put_tells_what_it_cannot_send(inputs: Project) -> None:
    def refused(*words: str) -> str:
        said = smk_mantik(inputs, "put", *words)
        assert said.code == 2, said.output
        return said.output

    tells(refused(), "there is nothing to send", "Name files")
    tells(refused("data/set"), "no run has used a site yet", "--site FILE")
    assert not inputs.exists(".snakemake")
    tells(refused("nothing.txt", "--site", str(inputs.config)), "nothing.txt: there is no such")
    tells(refused(".", "--site", str(inputs.config)), "it is no input of a job")
    inputs.write("keys/mine", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blb\n")
    inputs.write("keys/prod.env", "x")
    tells(
        refused("keys", "data/set", "--site", str(inputs.config)),
        "nothing sent", "keys/mine (a private key)", "keys/prod.env (named like", "Site: Include",
    )  # fmt: skip
    (inputs.workspace / "wait").mkdir(parents=True)
    running = inputs.start(*FILES_STAY, "other")
    until(lambda: any(record.site_jobs for record in inputs.attempts), "the job")
    tells(refused("data/set"), "another Snakemake", "when it has ended")
    (inputs.workspace / "wait").rmdir()
    running.end().ok()
    tells(refused("data/set", "--site", "there"), "no run has used a site named there")
    for path in ("made/other.txt", "made"):
        inputs.write("made/other.txt", "mine\n")
        tells(refused(path), "made/other.txt is the output of a job and stays at a site")
