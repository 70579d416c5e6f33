"""Options from every place, and what the scheduler is asked for in the end."""

import pytest

from tests.support.workflows import Project

SHOW = r"""
    rule show:
        output: "out.txt"
        threads: 3
        resources: {resources}
        shell:
            "echo $SLURM_CPUS_PER_TASK ${{{{SLURM_MEM_PER_NODE:-none}}}} $SLURM_JOB_PARTITION"
            " $SLURM_JOB_ACCOUNT > {{output}}"
"""


def asked(project: Project) -> str:
    """What the job saw of its allocation: CPUs, MiB of memory, partition, account."""
    return project.read("out.txt").strip()


@pytest.mark.parametrize(
    ("config", "resources", "options", "result"),
    [
        ("MemoryPerNode: 700M", "", ["--default-resources", "runtime=10"], "3 700 batch sandbox"),
        (
            "MemoryPerNode: 700M",
            "mem_mb=lambda w, attempt: attempt * 300, slurm_partition='devel', "
            "slurm_account='other'",
            ["--default-resources"],
            "3 300 devel other",
        ),
    ],
)
def test_resources_reach_the_scheduler(
    project: Project, config: str, resources: str, options: list[str], result: str
) -> None:
    if config:
        text = project.place.config.replace("  Queue: batch", f"  Queue: batch\n  {config}")
        project.config.write_text(text)
    project.write("Snakefile", SHOW.format(resources=resources or "runtime=5"))

    project.run(*options).ok()

    assert asked(project) == result


def test_a_warning_of_a_config_names_its_file_once(project: Project) -> None:
    text = project.place.config.replace("  Queue: batch", "  Queue: batch\n  Memory: 100M")
    project.config.write_text(text)
    project.write("Snakefile", SHOW.format(resources="runtime=5"))
    said = project.run().ok().output
    (line,) = [line for line in said.splitlines() if "Resources.Memory: is read as" in line]
    assert line.count(project.config.name) == 1


def test_resources_that_follow_from_a_file_that_is_still_to_be_made(project: Project) -> None:
    project.write(
        "Snakefile",
        """
        rule use:
            input: "made"
            output: "out.txt"
            resources:
                mem_mb=lambda wildcards, input: 100 * input.size_mb,
                slurm_partition=lambda wildcards, input: open(input[0], "rb").read(5).decode()
            shell:
                "echo {resources.mem_mb} $SLURM_MEM_PER_NODE $SLURM_JOB_PARTITION > {output}"

        rule make:
            output: "made"
            shell: "( printf devel; head -c 3145723 /dev/zero ) > {output}"
        """,
    )

    project.run().ok()

    assert asked(project) == "300 300 devel"


SITES = """
    rule all:
        input: "first.txt", "second.txt"

    rule first:
        output: "first.txt"
        shell: "echo $MARK > {output}"

    rule second:
        output: "second.txt"
        resources: mantik_site="other"
        shell: "echo $MARK > {output}"
"""


def write_sites(project: Project) -> list[str]:
    for name in ("one", "two"):
        environment = f"Environment:\n  Variables: {{MARK: {name}}}\n"
        project.write(f"{name}.yaml", project.place.config + environment)
    for key in ("USERNAME", "PASSWORD"):
        project.extra[f"MANTIK_UNICORE_{key}"] = project.place.environment[f"MANTIK_HPC1_{key}"]
    project.write("Snakefile", SITES)
    return ["one.yaml", "other=two.yaml"]


def test_sites_from_the_environment(project: Project) -> None:
    configs = write_sites(project)
    project.extra["SNAKEMAKE_MANTIK_BACKEND_CONFIG"] = f"[{', '.join(configs)}]"

    project.run("--executor", "mantik", "--jobs", "2", plain=True).ok()

    assert project.read("first.txt") + project.read("second.txt") == "one\ntwo\n"
    assert {record.site for record in project.tries} == {"one", "other"}


def test_a_jobs_name_at_the_site(project: Project) -> None:
    project.write(
        "Snakefile",
        """
        rule train:
            output: "{dataset}.{alpha}.txt"
            shell: "echo $SLURM_JOB_NAME > {output}"
        """,
    )

    project.run("digits.03.txt").ok()

    name = project.read("digits.03.txt")
    assert name.startswith("train")
    assert "digits" in name
