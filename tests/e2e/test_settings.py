"""Options from every place, and what the scheduler is asked for in the end."""

from tests.support.workflows import Project

SHOW = """
    rule of_config:
        output: "{dataset}.config.txt"
        threads: 3
        shell:
            "echo $SLURM_CPUS_PER_TASK $SLURM_MEM_PER_NODE $SLURM_JOB_PARTITION"
            " $SLURM_JOB_ACCOUNT $SLURM_JOB_NAME > {output}"

    use rule of_config as of_rule with:
        output: "{dataset}.rule.txt"
        resources:
            mem_mb=lambda w, attempt: attempt * 300, slurm_partition="devel",
            slurm_account="other"
"""


def test_resources_and_a_name_reach_the_scheduler(project: Project) -> None:
    """And a warning of the config names its file once."""
    text = project.place.config.replace("  Queue: batch", "  Queue: batch\n  Memory: 700M")
    project.config.write_text(text)
    project.write("Snakefile", SHOW)

    words = ("digits.config.txt", "digits.rule.txt", "--default-resources", "runtime=10")
    said = project.run(*words).ok()

    for name, asked in (("config", "3 700 batch sandbox"), ("rule", "3 300 devel other")):
        told = project.read(f"digits.{name}.txt")
        assert told.startswith(f"{asked} of_{name}")
        assert "digits" in told
    (line,) = [each for each in said.output.splitlines() if "Resources.Memory: is read as" in each]
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

    assert project.read("out.txt") == "300 300 devel\n"


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
    assert {record.site for record in project.attempts} == {"one", "other"}
