"""What goes up and what comes back: each content once, what changed again, nothing that is not."""

import os
import posixpath
import shutil
from collections import Counter

import pytest

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.jobs.library import library_path
from tests.support.workflows import Project, tells, tree, until


class Requests:
    """Counts the requests to the sandbox's site since the last look."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._seen: Counter[str] = Counter()
        self.since()

    def since(self) -> Counter[str]:
        """Those since the last call, by kind."""
        now = Counter(self._sandbox.record("hpc1")["requests"])
        new = now - self._seen
        self._seen = now
        return new

    @property
    def uploads(self) -> int:
        """Files (or permissions) that were put since the last look."""
        return self.since()["PUT storages/*/files"]


def test_outputs_of_all_sizes(firecrest: Project) -> None:
    firecrest.write(
        "Snakefile",
        """
        rule all:
            input: "big.bin", "many", "medium.a", "medium.b", "small", "müde.bin"

        rule big:
            output: "big.bin"
            shell: "head -c 20000000 /dev/urandom > {output}; sha256sum < {output} > sum"

        rule many:
            output: directory("many")
            shell:
                "mkdir -p {output}/x; "
                "for i in $(seq 300); do echo $i > {output}/x/$i.txt; done"

        rule medium:
            output: "medium.a", "medium.b", "small"
            shell:
                "head -c 2000000 /dev/zero | tee {output[0]} > {output[1]}; echo s > {output[2]}"

        rule named:
            output: "müde.bin"
            shell: "head -c 9000000 /dev/zero > {output}"
        """,
    )

    firecrest.run().ok()

    assert (firecrest.directory / "big.bin").read_bytes() == (
        firecrest.workspace / "big.bin"
    ).read_bytes()
    assert (firecrest.directory / "big.bin").stat().st_size == 20_000_000
    many = {p.name: p.read_text() for p in (firecrest.directory / "many/x").iterdir()}
    assert many == {f"{i}.txt": f"{i}\n" for i in range(1, 301)}
    for name in ("medium.a", "medium.b"):
        assert (firecrest.directory / name).read_bytes() == bytes(2_000_000)
    assert (firecrest.directory / "müde.bin").read_bytes() == bytes(9_000_000)
    left = [path for path in firecrest.directory.rglob("*") if "mantik-part" in path.name]
    assert not left
    transfers = firecrest.directory / ".snakemake/mantik/transfers"
    assert not [path for path in transfers.rglob("*") if path.is_file()]


def test_each_content_goes_up_once(project: Project, sandbox: Sandbox) -> None:
    project.write(
        "Snakefile",
        """
        rule all:
            input: "a.sum", "b.sum"

        rule sum:
            input: "data.bin"
            output: "{x}.sum"
            shell: "sha256sum {input} > {output}"

        rule more:
            input: "data.bin", "folder"
            output: "more"
            shell: "LC_ALL=C ls {input[1]} > {output}"
        """,
    )
    data = project.write("data.bin")
    data.write_bytes(os.urandom(3_000_000))  # one part
    for name in "ab":
        project.write(f"folder/{name}", name)
    requests = Requests(sandbox)

    project.run().ok()
    uploads = "the workspace's permissions, the lease, the library, the sources, the input"
    assert requests.uploads == 5, uploads
    assert tree(project.workspace) == tree(project.directory), "the site is left as a mirror"
    assert project.read("a.sum") == project.read("b.sum")

    os.utime(data)
    project.run("--forceall").ok()
    assert requests.uploads == 1, "the lease alone: touched, but the same"

    project.run("more").ok()
    assert requests.uploads == 1, "the lease alone: small inputs go with the job"
    assert project.read("more") == "a\nb\n"

    (project.directory / "folder/b").unlink()
    (project.workspace / "data.bin").unlink()
    ran = project.run("more", "--forcerun", "more").ok()
    assert requests.uploads == 2, f"the lease, and what was purged\n{ran.output}"
    assert project.read("more") == "a\n", "what is no longer here is not seen there"

    shutil.rmtree(project.workspace)
    project.run("--forceall").ok()
    assert requests.uploads == 5, "all of it has been purged"
    assert project.read("a.sum") == project.read("b.sum")


def test_nothing_is_left_of_what_a_killed_run_has_sent(project: Project) -> None:
    project.write(
        "Snakefile",
        """
        rule last:
            input: "first.txt"
            output: "last.txt"
            shell: "until [ -e go ]; do sleep 0.1; done; cp {input} {output}"

        rule first:
            input: "data.bin"
            output: "first.txt"
            shell: "sha256sum {input} > {output}"
        """,
    )
    project.write("data.bin").write_bytes(os.urandom(3_000_000))
    running = project.start()
    until(lambda: project.exists("first.txt") and "last: runs" in running.output, "the last job")
    running.kill()
    project.go()

    project.run("--rerun-incomplete", "--nolock").ok()

    assert not [*(project.workspace / ".mantik/bundles").glob("*/*")]


def test_sources_that_no_rule_names(both: Project) -> None:
    both.config.write_text(both.place.config + 'Exclude: ["private/**", "*.key"]\n')
    both.write(
        "Snakefile",
        """
        rule run:
            output: "out.txt"
            shell: "python3 scripts/main.py > {output}; ls -A . private >> {output} 2>&1 || true"
        """,
    )
    both.write("scripts/main.py", "from lib.words import WORD\nprint(WORD)\n")
    both.write("scripts/lib/words.py", "WORD = 'first'\n")
    both.write("private/salary.csv", "7\n")
    both.write("id.key", "secret\n")
    both.write("old.py", "")
    (both.directory / "huge.dat").write_bytes(bytes(3_000_000))

    tells(both.run().ok().output, ": 4 files (", ", without 1 too large")
    listed = both.read("out.txt").splitlines()
    assert listed[0] == "first"
    assert {"Snakefile", "old.py", "scripts"} <= set(listed)
    assert not {"private", "salary.csv", "id.key", "huge.dat", ".snakemake"} & set(listed)

    both.write("scripts/lib/words.py", "WORD = 'other'\n")
    (both.directory / "old.py").unlink()
    both.run("--forceall").ok()
    listed = both.read("out.txt").splitlines()
    assert listed[0] == "other"
    assert "old.py" not in listed
    ours = [path for path in (both.workspace / ".mantik").rglob("*") if path.is_file()]
    left = {path.name for path in ours if path.parent.name != "place"}
    assert left == {posixpath.basename(library_path())}, "only the lease and the library stay"


def test_links_of_outputs_stay_links_where_they_were_made(firecrest: Project) -> None:
    firecrest.write(
        "Snakefile",
        """
        rule all:
            input: "read.txt"

        rule make:
            output: directory("steps")
            shell:
                "mkdir -p {output}/step-9/deep; echo 9 > {output}/step-9/a; "
                "echo d > {output}/step-9/deep/d; "
                "ln -s step-9 {output}/latest; ln -s step-9/a {output}/one; ln -s .. {output}/deep"

        rule read:
            input: "steps"
            output: "read.txt"
            shell: "cat {input}/latest/a {input}/latest/deep/d {input}/one > {output}"
        """,
    )
    firecrest.run().ok()
    assert firecrest.read("read.txt") == "9\nd\n9\n"
    for link in ("latest", "one"):
        assert (firecrest.workspace / "steps" / link).is_symlink(), (
            "it was sent to where it is from"
        )
    (firecrest.directory / "steps/latest").unlink()
    snakefile = firecrest.read("Snakefile")
    firecrest.write("Snakefile", snakefile.replace("/latest/", "/step-9/"))
    firecrest.run("--forcerun", "read").ok()
    assert firecrest.read("read.txt") == "9\nd\n9\n"
    assert [record.rule for record in firecrest.attempts].count("read") == 2, "it was sent twice"
    # One that leads elsewhere now, to files some of which are the same.
    firecrest.write("mine/a", "9\n")
    firecrest.write("mine/deep/d", "mine\n")
    (firecrest.directory / "steps/latest").symlink_to("../mine")
    firecrest.write("Snakefile", snakefile)
    firecrest.run("--forcerun", "read").ok()
    assert firecrest.read("read.txt") == "9\nmine\n9\n"
    assert (firecrest.workspace / "steps/step-9/deep/d").read_text() == "d\n", "through the link"


@pytest.mark.parametrize("left", ["nothing", "half of it", "its size"])
def test_a_library_that_is_lost_before_a_job_starts_goes_up_again(both: Project, left: str) -> None:
    both.write(
        "Snakefile",
        """
        rule last:
            input: "first.txt"
            output: "last.txt"
            shell: "echo ran >> runs; cp {input} {output}"

        rule first:
            output: "first.txt"
            shell: "touch began; until [ -e go ]; do sleep 0.1; done; touch {output}"
        """,
    )
    running = both.start()
    running.says("last: waits for first")
    until((both.workspace / "began").exists, "the first job")
    [library] = (both.workspace / ".mantik").glob("lib-*.sh")
    content = library.read_bytes()
    if left == "nothing":
        library.unlink()
    elif left == "half of it":
        os.truncate(library, len(content) // 2)  # it keeps its owner
    else:
        with library.open("r+b") as damaged:
            damaged.seek(len(content) // 2)
            damaged.write(bytes(4096))
    both.go()

    running.end().ok()

    assert (both.workspace / "runs").read_text() == "ran\n"
    assert library.read_bytes() == content
