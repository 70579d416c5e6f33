"""MPI programs over several nodes: what the scheduler is asked for, and what starts the tasks."""

from collections import Counter

from tests.support.workflows import Project, tells

SNAKEFILE = """
    rule all:
        input: "srun.txt", "each.txt"

    rule srun:
        output: "srun.txt", "asked.txt"
        threads: 2
        resources: nodes=2, tasks=4, mpi="srun"
        shell:
            "echo $SLURM_NNODES $SLURM_NTASKS $SLURM_CPUS_PER_TASK > {output[1]};"
            " {resources.mpi} -n {resources.tasks}"
            " bash -c 'echo $SLURM_PROCID $SLURM_NODEID of $SLURM_NTASKS' > {output[0]}"

    rule each:
        output: "each.txt"
        resources: nodes=2, tasks_per_node=3
        shell: "srun bash -c 'echo $SLURM_NODEID {resources.tasks_per_node}' > {output}"
"""

BOXED = """
    rule all:
        input: "one.txt", "all.txt"

    rule one:
        output: "one.txt"
        resources: tasks=3, mpi="./mpiexec"
        shell: "{resources.mpi} -n {resources.tasks} echo $INSIDE >> {output}"

    rule all_of_them:
        output: "all.txt"
        resources: tasks=3, mpi="srun"
        shell: "echo $INSIDE $SLURM_NTASKS >> {output}"
"""

APPTAINER = """\
#!/bin/bash
shift 2
INSIDE=boxed exec "$@"
"""
"""Stands for `apptainer run IMAGE`, where this machine has none."""


def test_the_command_starts_tasks_on_all_nodes(project: Project) -> None:
    project.write("Snakefile", SNAKEFILE)
    project.run().ok()
    assert project.read("asked.txt") == "2 4 2\n"
    tasks = sorted(project.read("srun.txt").splitlines())
    assert tasks == ["0 0 of 4", "1 0 of 4", "2 1 of 4", "3 1 of 4"]
    assert Counter(project.read("each.txt").splitlines()) == {"0 3": 3, "1 3": 3}


def test_an_image_is_started_by_srun_or_once(project: Project) -> None:
    """The launcher is outside of the image; a command that brings its own is started once."""
    tools = project.directory.parent / "tools"
    tools.mkdir()
    (tools / "apptainer").write_text(APPTAINER)
    (tools / "apptainer").chmod(0o755)
    (tools / "x.sif").touch()
    config = f"""
Environment:
  Apptainer: {{Path: {tools}/x.sif, Type: remote}}
  PreRunCommandOnComputeNode: export PATH={tools}:$PATH
"""
    project.config.write_text(project.place.config + config)
    project.write("mpiexec", '#!/bin/bash\nfor ((i = 0; i < $2; i++)); do "${@:3}"; done\n')
    (project.directory / "mpiexec").chmod(0o755)
    project.write("Snakefile", BOXED)
    project.run().ok()
    assert project.read("one.txt") == "boxed\n" * 3
    assert project.read("all.txt") == "boxed 3\n" * 3

    said = project.run("--force", "one.txt", "--set-resources", "one:mpi=srun").failed()
    tells(said, "nothing submitted", "rule one", "does not contain it", "remove {resources.mpi}")
