"""Containers with the real Apptainer, at a site of processes and on Slurm."""

import os
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from tests.real import apptainer
from tests.support.places import MakeProject
from tests.support.workflows import UNTRACKED, Project, place_in, tells

pytestmark = pytest.mark.software("Apptainer")

IMAGE_SAYS = "made of local files\n"


@pytest.fixture(scope="session")
def image(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return apptainer.build(image_root, tmp_path_factory.mktemp("sif") / "small.sif")


@pytest.fixture(params=["processes", "slurm"])
def contained(request: pytest.FixtureRequest, project_at: MakeProject) -> Project:
    """A project at a UNICORE site without and with Slurm, whose jobs find apptainer."""
    box: Sandbox = request.getfixturevalue("slurm_box" if request.param == "slurm" else "sandbox")
    return project_at(place_in(box, "hpc1"), dict(UNTRACKED))


def configure(project: Project, image: str = "", variables: str = "") -> None:
    project.config.write_text(
        f"""{project.place.config}
Environment:
  Variables:
    # A container of root's needs more capabilities than a container has that the tests run in.
    APPTAINER_USERNS: "1"
    {variables}
{"  Apptainer:" if image else ""}
{image}
"""
    )


SNAKEFILE = """
    rule all:
        input: "out/one.txt", "out/two.txt", "made"

    rule cell:
        input: "in.txt", "../above.txt"
        output: "out/{x}.txt"
        threads: 2
        shell:
            "cat /etc/image {input[0]} ../above.txt > {output};"
            " echo {wildcards.x} $MARK {threads} >> {output};"
            "cat /data/given >> {output}; basename $PWD >> {output}"

    rule made:
        output: directory("made")
        shell: "mkdir {output}; umask 027; echo inside > {output}/file; id -u > {output}/uid"
"""


def test_local_image(contained: Project, image: Path, tmp_path: Path) -> None:
    data = tmp_path / "the data"
    data.mkdir()
    (data / "given").write_text("bound\n")
    contained.write("env/.keep")
    (contained.directory / "env" / "small.sif").write_bytes(image.read_bytes())
    configure(
        contained,
        '    Path: env/small.sif\n    Options: --nv --bind "$DATA:/data"',
        f"DATA: {data}\n    MARK: of the variables",
    )
    contained.write("Snakefile", SNAKEFILE)
    contained.write("in.txt", "read\n")
    contained.write("../above.txt", "above\n")

    contained.run().ok()

    end = f"bound\n{contained.workspace.name}\n"
    for x in ("one", "two"):
        wanted = f"{IMAGE_SAYS}read\nabove\n{x} of the variables 2\n{end}"
        assert contained.read(f"out/{x}.txt") == wanted
    # What was written inside belongs to the user outside, with the mode that it was given.
    assert contained.read("made/uid") == f"{os.geteuid()}\n"
    there = contained.workspace / "made" / "file"
    here = contained.directory / "made" / "file"
    assert {path.stat().st_uid for path in (here, there) if path.exists()} == {os.geteuid()}
    assert here.stat().st_mode & 0o777 == 0o640
    images = list(contained.place.server.rglob("small.sif"))
    assert len(images) == 1


def test_remote_image_and_exit_code(contained: Project, image_root: Path) -> None:
    configure(contained, f"    Path: {image_root}\n    Type: remote")
    contained.write(
        "Snakefile",
        """
        rule all:
            input: "good.txt", "bad.txt"
        rule good:
            output: "good.txt"
            shell: "cp /etc/image {output}"
        rule bad:
            output: "bad.txt"
            shell: "cat /etc/image; exit 7"
        """,
    )

    said = contained.run("--keep-going").failed()

    tells(said, "The command ended with exit code 7", IMAGE_SAYS)
    assert contained.read("good.txt") == IMAGE_SAYS


def test_broken_image(contained: Project) -> None:
    contained.write("env/broken.sif", "no image\n")
    configure(contained, "    Path: env/broken.sif")
    contained.write("Snakefile", 'rule one:\n    output: "out.txt"\n    shell: "touch {output}"\n')

    tells(contained.run().failed(), "broken.sif", "image format not recognized")


def test_image_of_a_rule(contained: Project, image: Path) -> None:
    configure(contained)
    contained.write("images/.keep")
    (contained.directory / "images" / "own.sif").write_bytes(image.read_bytes())
    contained.write(
        "Snakefile",
        """
        rule own:
            input: "../above.txt"
            output: "out.txt"
            container: "images/own.sif"
            shell: "cat /etc/image ../above.txt > {output}; echo {resources.tmpdir:q} >> {output}"
        """,
    )
    contained.write("../above.txt", "above\n")

    contained.run("--mantik-software-deployment", "apptainer").ok()

    assert contained.read("out.txt").startswith(f"{IMAGE_SAYS}above\n")


def test_datasets_are_mounted_read_only(contained: Project, image: Path) -> None:
    configure(contained)
    data = contained.place.storage / "a data:set"
    data.mkdir(parents=True)
    (data / "given").write_text("given\n")
    contained.write("images/.keep")
    (contained.directory / "images" / "own.sif").write_bytes(image.read_bytes())
    contained.write(
        "Snakefile",
        f"""
        rule own:
            input: storage.mantik("{contained.place.name}:{data}")
            output: "out.txt"
            container: "images/own.sif"
            shell:
                "cat {{input:q}}/given > {{output}};"
                " touch {{input:q}}/new 2>> {{output}} || true"
        """,
    )

    contained.run("--mantik-software-deployment", "apptainer").ok()

    tells(contained.read("out.txt"), "given", "Read-only file system")
    assert [path.name for path in data.iterdir()] == ["given"]
