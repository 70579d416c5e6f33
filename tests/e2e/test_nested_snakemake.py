"""Jobs that run a Snakemake at the site: what a comparison does not show."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.needs import require
from tests.support.workflows import UNTRACKED, Project, tells, until, with_snakemake

pytestmark = pytest.mark.software("Snakemake at a site")


@pytest.fixture
def project(project: Project) -> Project:
    """A project at a site whose environment has Snakemake."""
    return Project(project.directory, with_snakemake(project.place), dict(UNTRACKED))


def around(project: Project, before: str, after: str) -> Project:
    """The project with commands around each job, on the compute node."""
    hooks = f'PreRunCommandOnComputeNode: "{before}", PostRunCommandOnComputeNode: "{after}", '
    config = project.place.config.replace("Environment: {", f"Environment: {{{hooks}")
    return Project(project.directory, replace(project.place, config=config), dict(UNTRACKED))


def test_failure_is_told_with_the_lines_of_the_snakefile(project: Project) -> None:
    project.write(
        "Snakefile",
        """\
        rule broken:
            output: "out.txt"
            run:
                open(output[0], "w").write("half")
                print("before it broke")
                len(wildcards) / 0
        """,
    )
    ran = project.run()
    assert ran.code == 1
    tells(ran.output, "ZeroDivisionError", "line 6", "before it broke", "has run: and runs in")
    assert ran.output.count("has run: and runs in") == 1
    assert not project.exists("out.txt")
    assert not (project.workspace / "out.txt").exists()


def test_measured_by_snakemake_itself(project: Project) -> None:
    project.write(
        "Snakefile",
        """\
        rule measured:
            output: "out.txt"
            benchmark: repeat("bench/mark.tsv", 2)
            run:
                with open(output[0], "a") as file:
                    print(bench_iteration, file=file)
        """,
    )
    project.run().ok()
    assert project.read("out.txt") == "0\n1\n"
    header, *lines = project.read("bench/mark.tsv").splitlines()
    assert header.startswith("s\th:m:s\tmax_rss")
    assert len(lines) == 2


def test_names_wildcards_secrets_and_environment(project: Project) -> None:
    project.write(".here")  # not at the site
    project.extra["SECRET_WORD"] = "swordfish $HOME"
    project.write(
        "Snakefile",
        """\
        import os
        envvars: "SECRET_WORD"

        WORDS = ["a,b c='d'", "ü#%$HOME"]

        rule all:
            input: expand("out/{word}.txt", word=WORDS)

        rule word:
            output: "out/{word}.txt"
            params: word=lambda wildcards: wildcards.word
            threads: lambda wildcards: 2 if os.path.exists(".here") else 1
            resources: mem_mb=lambda wildcards: 600 if os.path.exists(".here") else 500
            run:
                with open(output[0], "w") as file:
                    print(wildcards.word, params.word, threads, resources.mem_mb, file=file)
                    print(os.environ["SECRET_WORD"], config.get("text"), config["deep"], file=file)
        """,
    )
    # Snakemake's local executor fails with these values: its shell sees the quotes.
    project.run("--config", "text=a b'c\"$d", "deep={'z': [1, 2]}").ok()
    for word in ("a,b c='d'", "ü#%$HOME"):
        said = f"{word} {word} 2 600\nswordfish $HOME a b'c\"$d {{'z': ['1', '2']}}\n"
        assert project.read(f"out/{word}.txt") == said
    lying = [p for p in project.workspace.rglob("*") if p.is_file()]
    assert not [
        path for path in lying if b"swordfish" in path.read_bytes() and "out" not in str(path)
    ]


def test_code_elsewhere(project: Project) -> None:
    """Snakefile, includes, config, script and helper modules outside of the working directory.

    While the job runs, they are away: at a site there is no way back to this machine.
    """
    home, base = project.directory.parent, project.directory.parent / "lab"
    hide = f"mv '{base}' '{home}/hidden'; mv '{project.directory}/inside' '{home}/inside'"
    show = f"mv '{home}/hidden' '{base}'; mv '{home}/inside' '{project.directory}/inside'"
    project = around(project, hide, show)
    project.write("inside/absolute.smk", "ABSOLUTE = 'absolute inside'\n")
    texts = {
        "workflow/Snakefile": f"""\
            configfile: "../lab/config/declared.yaml"
            include: "../common/more.smk"
            include: "{project.directory}/inside/absolute.smk"
            include: "{base}/common/absolute.smk"
            import helper
            from pathlib import Path
            TABLE = Path(workflow.basedir, "table.txt").read_text().split()

            rule all:
                input: "out.txt", "scripted.txt"

            rule out:
                input: workflow.source_path("../common/data.txt")
                output: "out.txt"
                params: path=workflow.source_path("../common/data.txt")
                run:
                    with open(output[0], "w") as file, open(params.path) as data:
                        file.write(open(input[0]).read())
                        print(config, MORE, ABSOLUTE, ELSEWHERE, helper.HELP, TABLE, file=file)
                        print(data.read(), file=file)

            rule scripted:
                input: "out.txt"
                output: "scripted.txt"
                script: "../scripts/do.py"
            """,
        "common/more.smk": "MORE = 'more'\n",
        "common/absolute.smk": "ELSEWHERE = 'absolute elsewhere'\n",
        "common/data.txt": "data\n",
        "config/declared.yaml": "a: 1\nb: declared\n",
        "config/given.yaml": "b: given\n",
        "workflow/helper.py": "HELP = 'help'\n",
        "workflow/table.txt": "t1 t2\n",
        "scripts/do.py": """\
            from snakemake.utils import simplify_path  # what only Snakemake has
            from near import NEAR
            with open(snakemake.output[0], "w") as file:
                print(NEAR, snakemake.config, file=file)
            """,
        "scripts/near.py": "NEAR = 'near'\n",
    }
    for path, text in texts.items():
        project.write(str(base / path), text)
    options = ("-s", "../lab/workflow/Snakefile", "--configfile", "../lab/config/given.yaml")
    project.run(*options).ok()
    twin = project.twin()
    (twin.directory / "out.txt").unlink()
    (twin.directory / "scripted.txt").unlink()
    twin.run(*options, local=True).ok()
    for path in ("out.txt", "scripted.txt"):
        assert project.read(path) == twin.read(path)
    tells(project.read("out.txt"), "'given'", "more absolute inside absolute elsewhere help", "t2")


SCHEMA = '"$schema": "https://json-schema.org/draft/2020-12/schema"\n'


def test_workdir_directive_and_a_profile(project: Project) -> None:
    """What stands before `workdir:` is relative to another directory than what follows it."""
    project.write("profiles/default/config.yaml", "mantik-track: none\nkeep-going: true\n")
    project.write("conf/first.yaml", "first: 1\nboth: 1\n")
    project.write("conf/schema.yaml", SCHEMA + "type: object\nrequired: [first]\n")
    project.write("samples.txt", "from beside\n")
    project.write("run/conf/second.yaml", "second: 2\nboth: 2\n")
    project.write("module/Snakefile", 'configfile: "conf/module.yaml"\n')
    project.write("conf/module.yaml", "module: 3\n")
    project.write(
        "Snakefile",
        """\
        configfile: "conf/first.yaml"
        from snakemake.utils import validate
        validate(config, "conf/schema.yaml")
        SAMPLES = open("samples.txt").read().strip()

        module other:
            snakefile: "module/Snakefile"

        use rule * from other

        workdir: "run"
        configfile: "conf/second.yaml"

        rule out:
            output: "out.txt"
            run:
                import os
                with open(output[0], "w") as file:
                    print(os.path.basename(os.path.dirname(os.getcwd())), file=file)
                    print(config["first"], config["second"], config["both"], SAMPLES, file=file)
        """,
    )
    project.run().ok()
    assert project.read("run/out.txt") == "up1\n1 2 2 from beside\n"


def test_config_files_beside_neither_the_snakefile_nor_the_files(project: Project) -> None:
    """They are where Snakemake was started, and in the directory that `workdir:` enters."""
    project.write("conf/first.yaml", "first: 1\nboth: 1\n")
    project.write("run/conf/second.yaml", "second: 2\nboth: 2\n")
    project.write(
        "wf/Snakefile",
        """\
        configfile: "conf/first.yaml"
        workdir: "run"
        configfile: "conf/second.yaml"

        rule out:
            output: "out.txt"
            run:
                with open(output[0], "w") as file:
                    print(config["first"], config["second"], config["both"], file=file)
        """,
    )
    project.config.write_text(
        project.config.read_text().replace("Site:\n", "Exclude: [conf/]\nSite:\n")
    )
    project.run("-s", "wf/Snakefile").ok()
    assert project.read("run/out.txt") == "1 2 2\n"


def test_inputs_that_are_others_at_the_site_are_no_silent_success(project: Project) -> None:
    project.write("raw/a.txt")
    project.write("raw/b.txt")
    project.write(
        "Snakefile",
        """\
        NAMES = sorted(glob_wildcards("raw/{name}.txt").name)
        localrules: cut

        rule all:
            input: "sum.txt"

        rule cut:
            input: "raw/{name}.txt"
            output: "cut/{name}.txt"
            shell: "cp {input} {output}"

        rule sum:
            input: expand("cut/{name}.txt", name=NAMES)
            output: "sum.txt"
            run:
                shell("cat {input} > {output}")
        """,
    )
    ran = project.run()
    assert ran.code == 1
    tells(ran.output, "lacks cut/a.txt, cut/b.txt", "sample sheet")
    assert not project.exists("sum.txt")


SIMPLE = """\
rule out:
    output: "out.txt"
    run:
        with open(output[0], "w") as file:
            print("made", file=file)
"""


LATE = """\
checkpoint split:
    output: "split.txt"
    shell: "touch {output}"

rule late:
    input: lambda _: [checkpoints.split.get().output[0], "out.txt"][1]
    output: "late.txt"
    shell: "touch {output}"
"""


def test_no_snakemake_at_the_site(project: Project) -> None:
    bare = project.place.config.split("Environment:")[0]
    project.write("Snakefile", SIMPLE)
    without = Project(project.directory, replace(project.place, config=bare), dict(UNTRACKED))
    # The sandbox's nodes have the PATH of the tests.
    first = without.run()
    assert first.code == 1
    tells(first.output, "there is no fitting Snakemake", "smk-mantik bootstrap hpc1")
    sent = len(without.attempts)
    second = without.run()
    assert second.code == 1
    tells(
        second.output, "nothing submitted", "rule out cannot run at hpc1", "has none", "bootstrap"
    )
    assert len(without.attempts) == sent
    # Nor is it submitted if only a checkpoint adds it.
    project.write("Snakefile", f"{SIMPLE}\n{LATE}")
    tells(without.run("late.txt").failed(), "rule out cannot run at hpc1", "has none", "bootstrap")
    assert [each.rule for each in without.attempts[sent:]] == ["split"]
    # Another environment is another question.
    Project(project.directory, project.place, dict(UNTRACKED)).run().ok()
    missing_snakemake = json.loads(project.read(".snakemake/mantik/lacks.json"))
    assert missing_snakemake == {}


def test_protected_and_temporary_files_are_so_here_alone(project: Project) -> None:
    project.write(
        "Snakefile",
        """\
        rule all:
            input: "kept"

        rule first:
            output: temp("temporary.txt")
            run:
                shell("echo 1 > {output}")

        rule kept:
            input: "temporary.txt"
            output: protected(directory("kept")), touch("touched")
            run:
                shell("mkdir {output[0]}; cp {input} {output[0]}")
        """,
    )
    project.run().ok()
    assert not project.exists("temporary.txt")
    assert not (project.directory / "kept" / "temporary.txt").stat().st_mode & 0o222
    assert (project.workspace / "kept" / "temporary.txt").stat().st_mode & 0o200
    assert Path(project.directory, "touched").exists()


def test_files_in_a_storage_that_the_node_does_not_reach(project: Project, tmp_path: Path) -> None:
    pytest.importorskip("snakemake_storage_plugin_fs")
    store, hidden = tmp_path / "store", tmp_path / "hidden"
    store.mkdir()
    (store / "in.txt").write_text("stored\n")
    project = around(project, f"mv '{store}' '{hidden}'", f"mv '{hidden}' '{store}'")
    project.write(
        "Snakefile",
        """\
        rule out:
            input: "in.txt"
            output: "out.txt"
            run:
                shell("cat {input} > {output}")
        """,
    )
    project.run("--default-storage-provider", "fs", "--default-storage-prefix", str(store)).ok()
    assert (store / "out.txt").read_text() == "stored\n"


@pytest.mark.parametrize("host", ["git+file", pytest.param("github", marks=pytest.mark.nightly)])
def test_module_of_a_repository(project: Project, tmp_path: Path, host: str) -> None:
    """What is no file of this machine travels, whatever its address: nodes reach nothing."""
    repository = Project(tmp_path / "repository", project.place)
    repository.write(
        "workflow/Snakefile",
        """\
        rule first:
            output: "first.txt"
            params: text=workflow.source_path("../data/text.txt")
            run:
                shell("cat {params.text} > {output}")

        rule second:
            input: "first.txt"
            output: "second.txt"
            script: "scripts/do.py"
        """,
    )
    repository.write("data/text.txt", "of the repository\n")
    repository.write(
        "workflow/scripts/do.py",
        """\
        from snakemake.utils import simplify_path  # what only Snakemake has
        with open(snakemake.input[0]) as source, open(snakemake.output[0], "w") as file:
            file.write(source.read().upper())
        """,
    )
    git = ["git", "-C", str(repository.directory), "-c", "user.name=x", "-c", "user.email=x@y.z"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v1"]):
        subprocess.run([*git, *words], check=True)
    # Where Snakemake has what it cloned of GitHub: nothing is fetched here, either.
    cache = "cache/snakemake/snakemake/source-cache/snakemake-git-cache/github.com/some/where"
    clone = ["git", "clone", "-q", "--bare", str(repository.directory), str(tmp_path / cache)]
    subprocess.run(clone, check=True)
    snakefile = {
        "git+file": f"'git+file://{repository.directory}/workflow/Snakefile@v1'",
        "github": "github('some/where', path='workflow/Snakefile', tag='v1')",
    }[host]
    hidden = tmp_path / "hidden"
    project = around(
        project,
        f"mv '{repository.directory}' '{hidden}'", f"mv '{hidden}' '{repository.directory}'",
    )  # fmt: skip
    project.write(
        "Snakefile",
        f"""\
        module other:
            snakefile: {snakefile}

        use rule * from other
        """,
    )
    project.extra["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    project.run("second.txt").ok()
    assert project.read("second.txt") == "OF THE REPOSITORY"


def test_cancelling_ends_what_a_nested_snakemake_runs(project: Project) -> None:
    project.write(
        "Snakefile",
        """\
        rule slow:
            output: "out.txt"
            run:
                shell("echo $$ > begun.txt; sleep 300; touch {output}")
        """,
    )
    running = project.start("--mantik-on-interrupt", "cancel")
    begun = project.workspace / "begun.txt"
    until(lambda: begun.exists() and begun.read_text().strip(), "the command")
    process = Path("/proc", begun.read_text().strip())
    assert process.exists()
    ran = running.interrupt()
    assert ran.code == 1, ran.output
    tells(ran.output, "no job of this run still runs")
    until(lambda: not process.exists(), "the end of the command")


def test_taken_up_again(project: Project) -> None:
    """A run that was killed, and before that had read code of a rule that is done now."""
    project.write(
        "Snakefile",
        """\
        rule first:
            output: "first.txt"
            script: "first.py"

        rule second:
            input: "first.txt"
            output: "second.txt"
            params: text=workflow.source_path(".hidden.txt")
            run:
                shell("touch begun; until [ -e go ]; do sleep 0.1; done")
                shell("cat {params.text} > {output}")
        """,
    )
    project.write("first.py", "open(snakemake.output[0], 'w').close()\n")
    project.write(".hidden.txt", "hidden\n")
    running = project.start("second.txt")
    until((project.workspace / "begun").exists, "the job's beginning")
    running.kill()
    again = project.start("second.txt", "--nolock", "--rerun-incomplete")
    again.says("reattached")
    project.go()
    again.end().ok()
    assert project.read("second.txt") == "hidden\n"


TOOL = """
    cwlVersion: v1.2
    class: CommandLineTool
    baseCommand: [sort]
    inputs:
      output: {type: string}
      given: {type: File, inputBinding: {position: 2}}
      key: {type: string, inputBinding: {prefix: -k, position: 1}}
    outputs:
      sorted: {type: stdout}
    stdout: $(inputs.output)
"""


CWLTOOL = Path(__file__).parents[2] / ".cache" / "real" / "cwltool" / "bin" / "cwltool"
"""As tests/real/install brings it."""


def test_cwl(project: Project) -> None:
    """Locally it fails before Python 3.14: cwltool refuses the address that Snakemake gives it."""
    require([] if CWLTOOL.exists() else ["cwltool"], "a rule with cwl:")
    project = around(project, f"export PATH={CWLTOOL.parent}:$PATH", "true")
    project.write("tools/sort it.cwl", TOOL)
    project.write("in.txt", "a 2\nb 1\n")
    project.write(
        "Snakefile",
        """
        rule sort:
            input: given="in.txt"
            output: output="{name}.txt"
            params: key="2"
            cwl: "tools/{wildcards.name} it.cwl"
        """,
    )
    project.run("sort.txt").ok()
    assert project.read("sort.txt") == "b 1\na 2\n"
