"""The rules' own environments at a site: modules, conda, containers."""

import os
from pathlib import Path

from hpc_sandbox import shims
from tests.support import condas
from tests.support.workflows import UNTRACKED, Project, one_rule_each, tells

ENGINE = r"""#!/bin/bash
# A stand-in for apptainer: the command runs where it is, in an image that is a text.
case $1 in
  pull) echo "$3" >> "${0%/*}/pulled"; echo "pulled $3" > "$2" ;;
  exec | run)
    words="$*"
    while [ -n "$1" ] && [ ! -f "$1" ]; do shift; done
    export IMAGE=$(cat "$1") OPTIONS=$words
    shift
    exec "$@" ;;
esac
"""

SNAKEFILE = """
    container: "docker://for/all"

    module other:
        snakefile: "../elsewhere/Snakefile"
        prefix: "sub"

    use rule * from other as other_*

    rule all:
        default_target: True
        input:
            "modules.txt", "conda-a.txt", "conda-b.txt", "named.txt", "sub/outside.txt",
            "image.txt", "both.txt", "dash.txt", "bare.txt",

    rule bare:
        output: "bare.txt"
        container: None
        shell: "echo ${{IMAGE-no image}} > {output}"

    rule modules:
        output: "modules.txt"
        envmodules: "Sandbox", "Sandbox/1.0"
        container: None
        shell: "echo $MANTIK_SANDBOX_MODULE $LOADEDMODULES ${{IMAGE-no image}} > {output}"

    rule conda:
        output: "conda-{x}.txt"
        benchmark: repeat(".conda-{x}.tsv", 2)
        conda: lambda wildcards: f"envs/{wildcards.x}.yaml"
        container: None
        shell: "tool | sed 's/ from.*/ {bench_iteration}/' >> {output};"
               "echo ${{IMAGE-no}} >> {output}"

    rule named:
        output: "named.txt"
        conda: "my-env"
        container: None
        shell: "echo ${{CONDA_PREFIX##*/}} > {output}"

    rule image:
        input: "in.txt"
        output: "image.txt"
        container: "images/own.sif"
        shell: "echo $IMAGE > {output}; cat {input} >> {output}; echo $OPTIONS > options.txt;"
               "case $OPTIONS in *' --nv --arg'*) echo options >> {output} ;; esac"

    rule both:
        output: "both.txt"
        log: "both.log"
        conda: "envs/a.yaml"
        shadow: "minimal"
        shell: "(tool; pwd) | sed 's/from.*//; s,/.*/shadow/.*,shadow,' > {output};"
               "echo $IMAGE > {log}; echo x > beside"

    rule dash:
        output: "dash.txt"
        envmodules: "Sandbox"
        container: None
        resources: shell_exec="sh"
        shell: "echo $0 $MANTIK_SANDBOX_MODULE > {output}"
"""

ELSEWHERE = """
    rule outside:
        output: "outside.txt"
        conda: "envs/{word}.yaml".format(word="far")
        container: None
        shell: "tool | sed 's/ from.*//' > {output}"
"""


def equip(project: Project, tmp_path: Path) -> Path:
    """Give the site stand-ins for conda and Apptainer, and a default image."""
    programs = tmp_path / "programs"
    condas.install(programs, "conda")
    (programs / "conda-envs/my-env/conda-meta").mkdir(parents=True)
    (programs / "apptainer").write_text(ENGINE)
    (programs / "apptainer").chmod(0o755)
    (programs / "default.sif").write_text("the default image")
    project.config.write_text(
        project.place.config
        + f"""
Environment:
  Apptainer:
    Path: {programs}/default.sif
    Type: remote
    Options: --nv
  Variables:
    PATH: {programs}:{shims.PROGRAMS}:{os.environ["PATH"]}
"""
    )
    project.extra.update(UNTRACKED)
    return programs


def test_each_rule_in_its_own(project: Project, tmp_path: Path) -> None:
    programs = equip(project, tmp_path)
    project.write("Snakefile", SNAKEFILE)
    project.write("../elsewhere/Snakefile", ELSEWHERE)
    project.write("../elsewhere/envs/far.yaml", "far")
    project.write("envs/a.yaml", "name of a")
    project.write("envs/b.yaml", "name of b")
    project.write("envs/b.post-deploy.sh", 'echo posted >> "$CONDA_PREFIX/../../../../posted"')
    project.write("images/own.sif", "an image of my own")
    project.write("in.txt", "in")
    methods = ["--mantik-software-deployment", "conda", "apptainer", "env-modules"]

    ran = project.run("--apptainer-args=--arg", *methods).ok()

    texts = {path.name: path.read_text() for path in project.directory.glob("*.txt")}
    assert texts == {
        "modules.txt": "1.0 Sandbox/1.0 no image\n",
        "conda-a.txt": "name of a 0\nno\nname of a 1\nno\n",
        "conda-b.txt": "name of b 0\nno\nname of b 1\nno\n",
        "named.txt": "my-env\n",
        "image.txt": "an image of my own\ninoptions\n",
        "both.txt": "name of a \nshadow\n",
        "dash.txt": "sh 1.0\n",
        "bare.txt": "no image\n",
        "in.txt": "in",
    }
    assert project.read("sub/outside.txt") == "far\n"
    assert project.read("both.log") == "pulled docker://for/all\n"
    assert sorted(project.directory.glob("beside*")) == []
    # Each content once, and once more where it is made in a container.
    made = (programs / "made").read_text().split("\n")
    assert sorted(made) == ["", "far", "name of a", "name of a", "name of b"]
    assert (project.workspace / "posted").read_text() == "posted\n"
    assert (programs / "pulled").read_text() == "docker://for/all\n"
    tells(
        ran.output,
        "rule image runs in its own environment, container: images/own.sif, and not in the image of"
        f" the backend config of {project.place.name}.",
        "rule bare runs in its own environment, container: None, and not in the image of",
    )
    assert not list((project.workspace / ".mantik/shadow").iterdir())


def test_what_is_not_wanted_is_not_used_and_told_once(project: Project, tmp_path: Path) -> None:
    equip(project, tmp_path)
    project.write(
        "Snakefile",
        """
        rule all:
            input: "a.txt", "b.txt", "bare"

        rule bare:
            output: "bare"
            container: None
            shell: "echo $IMAGE > {output}"

        rule one:
            output: "{x}.txt"
            conda: "not-here"
            container: "docker://some/image"
            envmodules: "Nothing/1"
            shell: "echo $IMAGE > {output}"
        """,
    )
    project.write("profile/config.yaml", "mantik-software-deployment:\n  - env-modules\n")

    ran = project.run().ok()

    assert project.read("a.txt") == project.read("bare") == "the default image\n"
    for told in (
        "Ignoring container: None of rule bare; pass --mantik-software-deployment apptainer",
        "Ignoring conda: not-here of rule one; pass --mantik-software-deployment conda to use it",
        "Ignoring container: docker://some/image of rule one; pass",
        "Ignoring envmodules: Nothing/1 of rule one; pass",
    ):
        assert ran.output.count(told) == 1, ran.output

    said = project.run("--profile", "profile", "--forceall").failed()
    tells(said, "rule one: not all modules could be loaded: Nothing/1")
    assert "Ignoring envmodules" not in said


def test_mistakes_are_told_before_anything_is_sent(project: Project, tmp_path: Path) -> None:
    equip(project, tmp_path)
    rules = one_rule_each(
        conda='conda: "envs/none.yaml"',
        image='container: "images/none.sif"',
        here='conda: "there"',
        yaml='conda: "envs/bad.yaml"',
        name='container: "ubuntu:22.04"',
    )
    project.write("Snakefile", rules)
    project.write("envs/bad.yaml", "dependencies: [a")
    (project.directory / "there").mkdir()

    said = project.run("--mantik-software-deployment", "conda", "apptainer").failed()
    tells(
        said,
        "nothing submitted",
        "rule conda has the environment file",
        "envs/none.yaml, which cannot be read",
        "rule image cannot run: the container image images/none.sif does not exist",
        "rule here has the conda environment",
        "envs/bad.yaml, which is not valid YAML: while parsing a flow sequence",
        "rule name cannot run: ubuntu:22.04 is neither a file nor a URL (did you mean docker://",
    )
    said = project.run("--mantik-software-deployment", "docker").failed()
    tells(said, "no software deployment 'docker'", "conda, apptainer, env-modules")

    project.write("Snakefile", 'rule m:\n    output: "m"\n    envmodules: "A"\n    shell: ":"\n')
    said = project.run("--software-deployment-method", "env-modules").failed()
    tells(
        said,
        "rule m has an environment that --software-deployment-method env-modules deploys on this"
        " machine",
        "use --mantik-software-deployment env-modules instead",
    )
    assert not project.exists(".snakemake/mantik/journal.sqlite")
