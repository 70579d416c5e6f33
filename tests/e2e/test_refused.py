"""What cannot work is refused at once, with what to do, before any job is sent."""

import os
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from tests.support.command import smk_mantik
from tests.support.ports import free_port
from tests.support.workflows import Place, Project, one_rule_each, tells

GOOD = """
rule good:
    output: "good.txt"
    shell: "touch {output}"
"""


AWS_KEY = "wJalrXUtnFEMIxK7MDENGxbPxRfiCYzEXAMPLE01"

NOTEBOOK = """
{"cells": [], "nbformat": 4, "nbformat_minor": 5,
 "metadata": {"language_info": {"name": "julia", "version": "1.11"}}}
"""


def submitted(sandbox: Sandbox) -> int:
    return len(sandbox.record("hpc1")["jobs"])


@pytest.fixture(autouse=True)
def _nothing_is_sent(sandbox: Sandbox) -> Iterator[None]:
    before = submitted(sandbox)
    yield
    assert submitted(sandbox) == before


def test_every_rule_that_cannot_run_is_named_once(project: Project) -> None:
    project.write("script.pl")
    project.write("notebook.ipynb", NOTEBOOK)
    project.write("good.txt")
    project.write("profiles/x")
    rules = one_rule_each(
        scripted='input: "profiles/../.mantik/x"\nscript: "script.pl"',
        noted='notebook: "notebook.ipynb"',
        first='group: "g"\nrun: open(output[0], "w").close()',
        grouped='input: "first"\ngroup: "g"\nresources: tasks=4',
    )
    ours = 'rule ours:\n    output: "profiles/../.mantik/x"\n    shell: "touch {output}"\n'
    project.write("Snakefile", f"{rules}\n{ours}")

    said = project.run().failed()

    tells(said, "not every rule can run at a site yet (nothing submitted): ")
    for words in (
        "rule scripted has script.pl, whose language Snakemake does not know: it takes .py",
        "rule noted has notebook.ipynb, whose language",
        "rule grouped requests tasks=4 in a group, whose members all run on one node",
        "rule ours uses profiles/../.mantik/x: .mantik is the executor's own directory",
    ):
        assert said.count(words) == 1, words
    tells(said, "Correct these rules, or name them in localrules: to run them here.")


def test_what_must_stay_here_is_no_input(project: Project) -> None:
    """Credentials by any link, secrets by content, and those in directories also by name."""
    secret = project.write("keys/hpc1", "anything")
    project.write("conf/aws.txt", f"id=AKIAIOSFODNN7EXAMPL2\n{AWS_KEY}\n")
    project.write("code/s.py", f"HOOK = 'https://hooks.slack.com/services/T00/B00/{AWS_KEY[:24]}'")
    project.write("data/token.txt", "x")
    (project.directory / "data/token.txt").chmod(0o600)
    project.write("config.yaml", f"db_password: {AWS_KEY}")
    project.write("plain.txt").unlink()
    os.link(secret, project.directory / "plain.txt")
    project.extra["MANTIK_OTHER_TOKEN_FILE"] = "keys/hpc1"
    rules = one_rule_each(
        file='input: "keys/hpc1"',
        folder='input: "keys"',
        linked='input: "plain.txt"',
        content='input: "conf/aws.txt"',
        named='input: "data/token.txt"',
        below='input: "data"',
        script='script: "code/s.py"',
        full="run: pass",
    )
    project.write("Snakefile", f'configfile: "config.yaml"\n{rules}')

    said = project.run().failed()

    for words in ("rule file reads keys/hpc1 (a", "rule folder reads keys/hpc1 (a",
                  "rule linked reads plain.txt (a",
                  "rule content reads conf/aws.txt (a key of AWS)",
                  "rule below reads data/token.txt (named like a secret)",
                  "rule script reads code/s.py (the secret address of a webhook)",
                  "rule full reads config.yaml (its setting db_password)"):  # fmt: skip
        assert said.count(words) == 1, (words, said)
    assert said.count("MANTIK_OTHER_TOKEN_FILE, which is never uploaded") == 3
    assert "rule named" not in said, "its user named it, and its content is no secret"
    assert AWS_KEY not in said

    config = project.config.read_text()
    include = "Site:\n  Include: [conf/, data/, s.py, config.yaml]\n"
    project.config.write_text(config.replace("Site:\n", include))
    said = project.run().failed()
    assert "rule linked" in said
    assert not [rule for rule in ("content", "below", "script", "full") if f"rule {rule}" in said]


def test_a_mistake_in_what_a_later_rule_runs_is_told_before_the_first(project: Project) -> None:
    project.write("s.py", "print(snakemake.output)")
    texts = {
        "command": "shell: \"awk '{print $1}' {input} > {output}\"",
        "parameter": 'params: words=1\nshell: "echo {params.word} > {output}"',
        "message": 'message: "makes {outptu}"',
        "here": 'localrule: True\nshell: "cp {inptu} {output}"',
        "script": "params: function=lambda wildcards: [lambda: 1]\n"
        'resources: tmpdir="/tmp"\nscript: "s.py"',
        "tmpdir": 'params: lambda wildcards, resources: resources.tmpdir\nscript: "s.py"',
        # What follows from a file that is still to be made is nobody's mistake.
        "reads": "params: read=lambda wildcards, input: open(input[0]).read().split()\n"
        'shell: "echo {params.read.x} > {output}"',
        "looks": "params: found=lambda wildcards, input: [n for n in input if os.path.exists(n)]\n"
        'shell: "echo {params.found[0]} > {output}"',
        "expression": "shell:"
        """ f"echo {open(input[0]).read() if isinstance(input, list) else ''} > {{output}}" """,
        "open": "resources: mem_mb=lambda wildcards, input: input.size_mb, licenses=1\n"
        'shell: "echo {resources.mem_mb} > {output}"',
    }
    behind = {rule: f'input: "first"\n{text}' for rule, text in texts.items()}
    project.write("Snakefile", "import os\n" + one_rule_each(first="", **behind))

    said = project.run().failed()

    tells(said, "nothing submitted: the commands of these rules cannot be made:")
    for words in ("print $1", "'Params' object has no attribute 'word'", "outptu", "inptu",
                  "rule script", "rule tmpdir"):  # fmt: skip
        assert said.count(words), words
    for rule in ("reads", "looks", "expression"):
        assert f"rule {rule}" not in said


def test_any_without_quotes_is_told_without_a_traceback(project: Project) -> None:
    """As an option, the function of Python itself is the value; in a Snakefile, what it returns."""
    project.write("Snakefile", GOOD)
    for options in ((), ("-n",)):
        said = project.run(*options, "--default-resources", "mantik_site=any").failed()
        tells(
            said, "rule good: its resource mantik_site has a function", """mantik_site="'any'"."""
        )
        assert "Traceback" not in said
    project.write("Snakefile", GOOD.replace("shell:", "resources: mantik_site=any\n    shell:"))
    tells(project.run().failed(), "rule good: the resource mantik_site: ", 'Put "any" in quotes')


def test_a_notebook_that_is_missing_is_told_without_a_traceback(project: Project) -> None:
    """Snakemake itself looks for it before there is an executor."""
    rule = """
        rule one:
            output: "{name}.csv"
            notebook: "scripts/{wildcards.name}.py"
    """
    project.write("Snakefile", rule)
    said = project.run("missing.csv").failed()
    tells(said, "rule one: notebook: scripts/{wildcards.name}.py does not exist (")
    tells(said, "scripts/missing.py). Correct the path", "nothing was submitted")


def test_resources_that_no_site_would_get_are_refused(project: Project) -> None:
    unknown = 'slurm_partitoin="batch", mem_gb=4, gpus_per_node=1, cores=1, cpus_per_task=1'
    rules = one_rule_each(
        open=f"resources: {unknown}, licenses=1, downloads=2", own="resources: ram=1",
        ours="resources: mantik_made_up=1",
    )  # fmt: skip
    project.write("Snakefile", rules)
    said = project.run("--resources", "ram=2").failed()
    tells(
        said,
        "Sites would not get these resources: rule open:",
        "there is no resource slurm_partitoin (did you mean slurm_partition?)",
        "Sites do not get these resources: gpus_per_node of open (sites get gpu, which counts those"
        " of all nodes); mem_gb of open (sites get mem_mb).",
        "there is no resource mantik_made_up. Use one of mantik_site, ",
        "--resources NAME=100",
    )
    for name in ("licenses", "downloads", "ram", "mem_gb", "gpus_per_node", "cores"):
        assert f"no resource {name}" not in said


def test_more_jobs_than_a_site_takes_at_once_are_told(project: Project) -> None:
    project.write(
        "Snakefile",
        """
        rule all:
            input: expand("{n}.txt", n=range(3))

        rule one:
            output: "{n}.txt"
            shell: "touch {output}"
        """,
    )
    config = project.place.config.replace("Site:", "Site:\n  MaxJobs: 2")
    project.config.write_text(config)
    said = project.run().ok().output
    assert said.count("--jobs 20: at most 2 at hpc1 are submitted at once (Site: MaxJobs") == 1
    project.config.write_text(config.replace("MaxJobs: 2", "MaxJobs: 3"))
    said = project.run("--forceall").ok().output
    assert "MaxJobs" not in said, "three jobs fit, whatever --jobs would allow"


GROUP = """
    rule one{g}:
        output: "1{g}"
        group: "{g}"
        resources: {one}
        shell: "touch {{output}}"

    rule two{g}:
        input: "1{g}"
        output: "2{g}"
        group: "{g}"
        resources: {two}
        shell: "touch {{output}}"
"""
MISFITS = {
    ('mantik_site="hpc2"', "runtime=5"): "are to run at different sites: onea at hpc2; twoa at",
    ('queue="batch"', 'queue="devel"'): "queue is 'batch' for oneb, 'devel' for twob",
    ("mem_mb=5, mem_mb_per_cpu=5", "runtime=5"): "rule onec: the resources mem_mb=5 and",
}


def test_members_that_do_not_fit_into_one_job(project: Project, firecrest_place: Place) -> None:
    second = project.directory.parent / "hpc2.yaml"
    second.write_text(firecrest_place.config)
    project.sites = [str(second)]
    texts = [GROUP.format(g=g, one=a, two=b) for g, (a, b) in zip("abc", MISFITS, strict=True)]
    project.write("Snakefile", "".join(texts))
    said = project.run("2a", "2b", "2c").failed()
    tells(said, "nothing submitted", *MISFITS.values(), "group a (rules onea, twoa)")
    long = GROUP.format(g="d", one="runtime=1000", two="runtime=1000")
    project.write("Snakefile", long)
    tells(project.run("2d").failed(), "group d (rules oned, twod)", "runtime: ")


CHECKPOINTS = """
checkpoint outer:
    output: directory("outer.d")
    shell: "mkdir {output}"

checkpoint split:
    output: directory("{s}.d")
    group: "{s}"
    shell: "mkdir {output}"

checkpoint inner:
    output: directory("inner.d")
    group: "nested"
    shell: "mkdir {output}"

def inner_files():
    return checkpoints.inner.get().output[0]
"""


def test_members_whose_values_nobody_would_evaluate(project: Project) -> None:
    """Each asks in its own way for files of a checkpoint in its own group, except the last two."""
    rules = one_rule_each(
        direct='group: "direct"\n'
        'input: lambda _: getattr(checkpoints, "split").get(s="direct").output[0]',
        nested='group: "nested"\n'
        "input: lambda _: [checkpoints.outer.get().output[0], inner_files()]",
        full='group: "full"\ninput: "full.d"\n'
        'params: n=lambda _, input: len(checkpoints.split.get(s="full").output)\n'
        'run: open(output[0], "w").close()',
        sized='group: "sized"\ninput: "sized.d"\n'
        'resources: mem_mb=lambda _: len(checkpoints.split.get(s="sized").output)',
        option='input: lambda _: checkpoints.split.get(s="option").output[0]',
        first='group: "queued"',
        queued='group: "queued"\ninput: "first", from_queue(queue, finish_sentinel="end")',
        outside='group: "sized"\ninput: lambda _: checkpoints.outer.get().output[0], "full"\n'
        'params: path="a/b".split("/")',
    )
    begin = "from queue import Queue\nqueue = Queue()\n"
    project.write("Snakefile", f"{begin}{rules}{CHECKPOINTS}")

    said = project.run("--groups", "option=option").failed()

    for rule, checkpoint in (
        ("direct", "split"),
        ("nested", "inner"),
        ("full", "split"),
        ("sized", "split"),
        ("option", "split"),
    ):
        words = f"rule {rule} asks for the files of checkpoint {checkpoint}, which is in its own"
        assert said.count(f"{words} group {rule}: it") == 1, rule
    tells(said, "rule queued reads files from a queue (from_queue) in a group", "nothing submitted")
    assert "rule outside" not in said


def test_a_member_that_asks_for_another_checkpoint_than_before(project: Project) -> None:
    """Nobody can know that it will, before the first checkpoint has ended."""
    project.write(
        "Snakefile",
        """
        NAME = "inner"

        checkpoint outer:
            output: directory("outer.d")
            shell: "mkdir {output}"

        checkpoint inner:
            output: directory("inner.d")
            group: "both"
            shell: "mkdir {output}; touch {output}/1"

        def found(_):
            checkpoints.outer.get()
            folder = getattr(checkpoints, NAME).get().output[0]
            return expand(folder + "/{n}", n=glob_wildcards(folder + "/{n}").n)

        rule nested:
            input: "inner.d", found
            output: "nested"
            group: "both"
            shell: "ls -d {input} > {output}"
        """,
    )

    said = project.run("nested").failed()

    if "Out of jobs ready" not in said:  # by chance, Snakemake (9.27) does not even begin the group
        tells(said, "rule nested asks for the files of checkpoint inner, which is in its own group")
    assert not project.exists("nested")
    assert {record.rule for record in project.attempts} == {"outer"}


def test_resources_that_cannot_be_had(project: Project) -> None:
    wrong = {
        "a": 'mantik_site="hcp1"',
        "b": 'nodes="lots"',
        "c": "mem_mb=100, mem_mb_per_cpu=100",
        "d": 'gpu="many"',
        "e": 'mantiksite="hpc1"',
        "f": 'slurm_partition="a b"',
        "g": 'gpu_model="a100"',
        "h": """slurm_extra="'--qos=low'\"""",
    }
    rules = {rule: f"resources: {asked}" for rule, asked in wrong.items()}
    project.write("Snakefile", one_rule_each(**rules))

    said = project.run().failed()

    tells(
        said,
        "nothing submitted: invalid resource requests:",
        "there is no site 'hcp1' (did you mean hpc1?); the known ones are hpc1",
        "there is no resource mantiksite (did you mean mantik_site?)",
        "'a b' is not a valid value for --partition",
        "gpu_model=a100 names a kind of GPU, but the job requests no GPUs",
        "Use `qos` instead",
    )
    for rule in "abcdefgh":
        assert said.count(f"\n  rule {rule}") == 1, said
    assert ".." not in said.split("invalid resource requests:")[1], said


def test_beyond_the_queues_limits(project: Project) -> None:
    beyond = {
        "runtime=60 * 24 * 30": "runtime: 30 days requested; queue batch allows at most 24 h",
        "mem_mb=10**9": "memory: ",
        "cpus_per_task=4000": "CPUs per node: 4000 requested; queue batch allows at most",
    }
    rules = {f"r{n}": f"resources: {resource}" for n, resource in enumerate(beyond)}
    rules["all_of_them"] = f"resources: {', '.join(beyond)}"
    project.write("Snakefile", one_rule_each(**rules))

    said = project.run().failed()

    tells(said, *beyond.values(), *(f"rule r{n}" for n in range(3)), "nothing submitted")
    [line] = [line for line in said.splitlines() if "rule all_of_them: " in line]
    tells(line, *beyond.values())
    assert line.count("Request less, or choose another queue") == 1, line


def test_a_queue_that_is_not_listed_may_exist(project: Project) -> None:
    """And so may one of several, of which Slurm takes whichever starts the job first."""
    rules = one_rule_each(
        hidden='resources: slurm_partition="hidden"',
        either='resources: slurm_partition="devel,batch", runtime=60 * 20',
        first="resources: runtime=60 * 20, slurm_extra=\"'--mail-type=END --exclusive'\"",
    )
    project.write("Snakefile", rules)
    config = project.config.read_text()
    assert "Queue: batch\n" in config
    project.config.write_text(config.replace("Queue: batch\n", "Queue: auto\n"))
    said = project.run().ok().output
    assert said.count("the site lists no queue 'hidden', only batch, devel") == 1, said
    assert {record.rule: record.queue for record in project.attempts} == {
        "hidden": "hidden", "either": "devel,batch", "first": "batch",
    }  # fmt: skip


def test_no_config(project: Project) -> None:
    """Without anything to do it needs none."""
    project.write("Snakefile", GOOD)

    said = project.run("--executor", "mantik", "--jobs", "1", plain=True).failed()

    tells(
        said,
        "--mantik-backend-config: no Compute Backend Config was given",
        "smk-mantik init",
        "SNAKEMAKE_MANTIK_BACKEND_CONFIG",
    )
    project.write("good.txt")
    said = project.run("--executor", "mantik", "-j1", plain=True).ok().output
    assert "Nothing to be done" in said


def test_what_keeps_a_run_from_its_site(project: Project) -> None:
    """Missing credentials, a wrong password, a server that is not there, an option."""
    project.write("Snakefile", GOOD)
    said = project.run("--immediate-submit", "--notemp").failed()
    tells(said, "--immediate-submit does not work with the mantik executor", "Remove the option")
    project.extra["MANTIK_HPC1_PASSWORD"] = "a wrong guess"
    said = project.run().failed()
    tells(said, "hpc1", "403", "Check MANTIK_HPC1_USERNAME, MANTIK_HPC1_PASSWORD.")
    assert "a wrong guess" not in said
    names = [name for name in project.place.environment if name.startswith("MANTIK_HPC1")]
    project.extra |= dict.fromkeys(names, "")
    said = project.run().failed()
    tells(said, "each also as MANTIK_HPC1_…", "MANTIK_UNICORE_USERNAME", "MANTIK_UNICORE_TOKEN")
    for name in names:
        del project.extra[name]
    project.config.write_text(
        f"UnicoreApiUrl: http://127.0.0.1:{free_port()}/rest/core\nResources: {{Queue: batch}}\n"
    )
    tells(project.run().failed(), "hpc1", "127.0.0.1")


def test_conda_for_jobs_here_without_a_conda_here(project: Project) -> None:
    project.write("Snakefile", "rule all:\n    input: 'good.txt'\n" + GOOD)
    project.extra["PATH"] = "/usr/bin:/bin"
    if shutil.which("conda", path=project.extra["PATH"]):
        pytest.skip("there is a conda among the system's own programs")

    said = project.run("--use-conda").failed()

    tells(said, "nothing submitted: --software-deployment-method conda applies to jobs on this")
    tells(said, "Use --mantik-software-deployment conda for jobs at sites")


ENVIRONMENTS = one_rule_each(
    a='conda: "env.yaml"', b='container: "docker://debian"', c='conda: "env.yaml"\nlocalrule: True'
)
DEPLOYER = """#!/bin/sh
echo "$(basename "$0") $*" >> "$ASKED"
case "$*" in
  "info --json") echo '{"conda_prefix": "/nowhere", "platform": "linux-64"}';;
  --version) echo "$(basename "$0") 24.9.2";;
  config*) echo '{"get": {"channel_priority": "strict"}}';;
esac
"""
"""Stands in for conda and apptainer, and writes down what it is asked."""


@pytest.mark.parametrize("here", [False, True])
def test_environments_are_refused_before_snakemake_makes_them_here(
    project: Project, tmp_path: Path, *, here: bool
) -> None:
    project.write("Snakefile", ENVIRONMENTS)
    project.write("env.yaml", "dependencies: [zlib]\n")
    programs, asked = tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    if here:
        for name in ("conda", "apptainer"):
            (programs / name).write_text(DEPLOYER)
            (programs / name).chmod(0o755)
    project.extra |= {"PATH": f"{programs}:/usr/bin:/bin", "ASKED": str(asked)}
    elsewhere = [shutil.which(name, path="/usr/bin:/bin") for name in ("conda", "apptainer")]
    if not here and any(elsewhere):
        pytest.skip("there is a conda or an apptainer among the system's own programs")

    for target, method in (("a", "conda"), ("b", "apptainer")):
        words = [target, f"--use-{method}"]
        all_said = [project.run(*words).failed()]
        if not here:
            config = ["--mantik-backend-config", str(project.config)]
            all_said += [smk_mantik(project, "plan", *config, *words[1:], "--", target).output]
            for more in (["-n"], ["--mantik-software-deployment", method]):
                said = project.run(*words, *more).failed()
                tells(said, f"machine, which has no {method}", f"--use-{method}, also from the")
        for said in all_said:
            tells(said, f"rule {target} has an environment that --software-deployment-method")
            tells(said, f"use --mantik-software-deployment {method} instead")
            assert "conda info" not in said

    made = asked.read_text() if here else ""
    assert "env create" not in made
    assert "pull" not in made
    project.run("c", "--use-conda")  # makes the environment of a local rule
    assert not here or "env create" in asked.read_text()


def test_an_environment_file_that_nobody_uses_is_missing(project: Project) -> None:
    """Snakemake reads it when the job has ended, and ends the run."""
    rules = one_rule_each(a='conda: "a.yaml"', b='conda: "b.yaml"\nlocalrule: True')
    project.write("Snakefile", rules)

    said = project.run().failed()

    tells(said, "nothing submitted", "rule a has the environment file", "a.yaml, which cannot be")
    tells(said, "rule b has the environment file", "b.yaml, which cannot be read")


def test_a_date_in_the_future(project: Project) -> None:
    """Snakemake would refuse each output, or make it again at each start."""
    for name in ("link", "target"):
        project.write(f"elsewhere/{name}.txt")
        (project.directory / f"{name}.txt").symlink_to(f"elsewhere/{name}.txt")
    project.write("copy.sh", 'cp "${snakemake_input[0]}" "${snakemake_output[0]}"')
    project.write(
        "Snakefile",
        """
        rule a:
            input: "link.txt", "target.txt"
            output: "a.txt"
            script: "copy.sh"
        """,
    )
    later = time.time() + 100 * 86400 + 1800
    for dated in ("link.txt", "elsewhere/target.txt", "copy.sh"):
        os.utime(project.directory / dated, (later, later), follow_symlinks=False)

    said = project.run().failed()

    tells(said, "inputs are dated in the future (nothing submitted)", "touch ")
    tells(
        said, *(f"{name} (by 100 days, rule a)" for name in ("link.txt", "target.txt", "copy.sh"))
    )


def test_a_date_a_little_ahead_is_waited_for(project: Project) -> None:
    project.write("in.txt")
    link = project.directory.parent / "link"  # the job's own in.txt is another file
    link.symlink_to(project.directory / "in.txt")
    dated = shlex.quote(str(link))
    project.write(
        "Snakefile",
        f"""
        rule a:
            input: "in.txt"
            output: "a.txt"
            shell: "cp {{input}} {{output}}; touch -d '+7 seconds' {dated}"
        """,
    )

    project.run().ok()

    tells(project.run().ok().output, "Nothing to be done")


def test_mistakes_of_all_kinds_are_reported_together(project: Project, tmp_path: Path) -> None:
    """Also if Snakemake itself finds the first of them: that gone.py does not exist."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("UnicoreApiUrl: nonsense\nResources: {Queue: batch, Nodes: many}\n")
    project.sites.append(str(wrong))
    project.write("bad.py", "def f(:\n")
    project.write(
        "Snakefile",
        one_rule_each(
            a='resources: mantik_site="hpc11"',
            b='resources: mantik_site="wrong", mantik_environment="gpu"\nshell: "touch {outptu}"',
            c='resources: slurm_partitoin="x"',
            d='script: "bad.py"',
            e='resources: mantik_site="wrong", mantik_retry_on="x"',
            f="resources: runtime=-1",
            g='script: "gone.py"',
        ),
    )

    said = project.run().failed()

    tells(
        said,
        "Nothing submitted: the workflow has 5 kinds of mistakes.",
        "\n1. 2 mistakes in the configuration.",
        "Resources.Nodes",
        "\n2. Not every rule can run at a site yet: rule d has script: bad.py, which is no valid",
        "rule g has script: gone.py, which does not exist",
        "rule c: there is no resource slurm_partitoin (did you mean slurm_partition?)",
        "there is no site 'hpc11' (did you mean hpc1?)",
        "mantik_retry_on='x'",
        "outptu",
    )
    assert "environment" not in said, "which ones a config has is unknown while it is invalid"


@pytest.mark.parametrize("lock", [False, True])
def test_a_journal_that_cannot_be_written(project: Project, lock: bool) -> None:
    project.write("Snakefile", GOOD)
    if lock:
        (project.directory / ".snakemake/mantik/lock").mkdir(parents=True)
    else:
        project.write(".snakemake/mantik")
    tells(project.run().failed(), "the journal cannot be written (", "Check its permissions")
    jobs = smk_mantik(project, "jobs")
    assert jobs.code == 2
    tells(jobs.output, "it cannot be seen whether the file is locked (", "Check its permissions")
