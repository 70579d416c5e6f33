"""MPI programs over several nodes: what the scheduler is asked for, and what starts the tasks."""

from tests.support.workflows import Project, tells

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
