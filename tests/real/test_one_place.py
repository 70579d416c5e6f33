"""One directory behind two real servers: the sites share its files, and each content is right."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.jobs.paths import workspace_below
from tests.real.centre import USER, Centre, tsi
from tests.support.places import MakeProject
from tests.support.workflows import UNTRACKED, Place, Project

pytestmark = [pytest.mark.software(tsi.SOFTWARE)]

LARGE = 3_000_000

SNAKEFILE = """
    FIRST, SECOND = config["first"], config["second"]

    rule all:
        input: "size.txt", "first.txt", "second.txt"

    rule make:
        output: "large.bin", "made.txt"
        resources: mantik_site=FIRST
        shell: "head -c {size} /dev/urandom > {{output[0]}}; ls -i {{output[0]}} > {{output[1]}}"

    rule read:
        input: "large.bin"
        output: "size.txt"
        resources: mantik_site=SECOND
        shell: "sha256sum < {{input}} > {{output}}; ls -i {{input}} >> {{output}}"

    rule first:
        input: "rate.txt"
        output: "first.txt"
        resources: mantik_site=FIRST
        shell: "cat {{input}} > {{output}}"

    rule second:
        input: "rate.txt"
        output: "second.txt"
        resources: mantik_site=SECOND
        shell: "cat {{input}} > {{output}}"
"""


@pytest.fixture
def workspace(centre: Centre) -> Iterator[Path]:
    """A directory at the centre that both servers see."""
    directory = Path(tempfile.mkdtemp(prefix="one-place-", dir=centre.scratch))
    shutil.chown(directory, USER, USER)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def project(
    workspace: Path,
    unicore_centre_place: Place,
    firecrest_centre_place: Place,
    tmp_path: Path,
    project_at: MakeProject,
) -> Project:
    """A project at both sites, with one workspace."""

    def there(place: Place) -> Place:
        config = place.config.replace("Site:\n", f"Site:\n  Workspace: {workspace}\n")
        assert str(workspace) in config
        return replace(place, config=config)

    one, other = there(unicore_centre_place), there(firecrest_centre_place)
    config = tmp_path / f"{other.name}.yaml"
    config.write_text(other.config)
    extra = {**other.environment, **UNTRACKED}
    return project_at(one, extra, [str(config)])


def test_two_servers_share_files_and_contents(
    project: Project, workspace: Path, firecrest_centre_place: Place
) -> None:
    """An input goes from 0.1 to 0.2 and back while the sites are swapped from run to run."""
    names = (project.place.name, firecrest_centre_place.name)
    project.write("Snakefile", SNAKEFILE.format(size=LARGE))
    inode = None
    for number, rate in enumerate(("0.1", "0.2", "0.1")):
        project.write("rate.txt", f"{rate}\n")
        os.utime(project.directory / "rate.txt")
        first, second = names if number % 2 == 0 else names[::-1]
        ran = project.run(
            "--config", f"first={first}", f"second={second}", "--rerun-triggers", "mtime"
        ).ok()
        assert project.read("first.txt") == f"{rate}\n", ran.output
        assert project.read("second.txt") == f"{rate}\n", ran.output
        found = Path(workspace_below(str(workspace)), "large.bin").stat().st_ino
        assert inode in (None, found), "it was sent again"
        inode = found
    made = {
        record.rule: record.site for record in project.attempts if record.rule in ("make", "read")
    }
    assert made == {"make": names[0], "read": names[1]}
    assert project.read("made.txt") in project.read("size.txt"), "what the other site has made"
    assert {record.outcome for record in project.attempts} == {"succeeded"}
    assert len({record.place for record in project.attempts}) == 1
    assert len(project.attempts) == 8
