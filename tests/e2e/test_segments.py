"""A job goes on past its walltime, in segments, from its checkpoint."""

from hpc_sandbox.server import Sandbox
from tests.support.command import smk_mantik
from tests.support.workflows import Project, Running, one_rule_each, tells, until

TRAIN = """
    import os, signal, sys, time

    EPOCHS, PER_SEGMENT = 8, 2

    def noted(name, *words):
        with open(name, "a") as notes:
            print(*words, file=notes, flush=True)

    def save(epoch):
        with open("ckpt/new", "w") as checkpoint:
            checkpoint.write(str(epoch))
        os.replace("ckpt/new", "ckpt/epoch")

    epoch = int(open("ckpt/epoch").read()) if os.path.exists("ckpt/epoch") else 0
    segment = int(os.environ["MANTIK_SEGMENT"])
    print("segment", segment, flush=True)
    noted("segments.txt", segment, os.environ["MANTIK_SEGMENTS"], epoch)
    for done in range(PER_SEGMENT):
        noted("loss.txt", epoch)
        epoch += 1
        save(epoch)
        if epoch == EPOCHS:
            noted("model.txt", "trained")
            sys.exit(0)
    if segment == 0 or os.path.exists("slow"):
        time.sleep(600)  # until the walltime ends
    while os.path.exists(f"held-{segment}"):
        time.sleep(0.05)
    sys.exit(85)
"""
SNAKEFILE = """
    rule train:
        input: "train.py"
        output: "model.txt"
        resources: mantik_continue=10, mantik_checkpoint="ckpt/", mantik_warn="3s"
        shell: "python3 {input}"

    rule evaluate:
        input: "model.txt"
        output: "score.txt"
        shell: "cat {input} > {output}"
"""


def written(project: Project, runtime: str = "45s") -> Project:
    text = project.config.read_text()
    assert "Resources:\n" in text
    project.config.write_text(text.replace("Resources:\n", f"Resources:\n  Runtime: {runtime}\n"))
    project.write("train.py", TRAIN)
    project.write("Snakefile", SNAKEFILE)
    return project


def is_trained(project: Project, segments: int = 4) -> None:
    """Each epoch was computed once, and each segment went on where the one before had ended."""
    place = project.workspace
    assert (place / "loss.txt").read_text().split() == [str(n) for n in range(8)]
    noted = (place / "segments.txt").read_text().splitlines()
    assert noted == [f"{n} 10 {2 * n}" for n in range(segments)]
    assert project.read("score.txt") == "trained\n"
    assert not project.exists("ckpt")
    assert (place / "ckpt/epoch").read_text() == "8"


def test_a_training_goes_on_past_its_walltime(firecrest: Project) -> None:
    """The walltime ends the first segment, the others end themselves early."""
    said = written(firecrest).run("score.txt").ok().output
    is_trained(firecrest)
    tells(said, "segment 1 of 10 has ended (time limit)", "segment 2 of 10 has ended (it asked")
    assert "reattached" not in said, "this run submitted all of them"
    ran = [r for r in firecrest.attempts if r.rule == "train" and r.outcome != "cancelled"]
    attempts = [(r.segment, r.segments, r.reason) for r in ran]
    assert attempts == [(n, 10, "") for n in range(4)], said
    of_each = (f"==> segment {n + 1} of 10 <==\nsegment {n}\n" for n in range(4))
    tells(smk_mantik(firecrest, "logs", "train").ok().output, *of_each)


def test_its_controller_may_be_killed_in_any_segment(project: Project, sandbox: Sandbox) -> None:
    written(project, "200s")
    project.write("train.py", TRAIN.replace("if segment == 0 or", "if"))
    before = len(sandbox.record("hpc1")["runs"])
    place = project.workspace
    place.mkdir(parents=True)
    for number in (0, 2):
        (place / f"held-{number}").touch()
    for number in (0, 2):
        run = project.start("score.txt", "--nolock", "--rerun-incomplete")
        begun(project, run, number)
        until(lambda: sum(bool(r.site_jobs) for r in project.attempts) >= 10, "the segments ahead")
        run.kill()
        (place / f"held-{number}").unlink()
    # The rest goes on without a controller, since it was presubmitted.
    until((place / "model.txt").exists, "the model")
    project.run("score.txt", "--nolock", "--rerun-incomplete").ok()
    is_trained(project)
    ran = [(r.segment, r.state, r.outcome) for r in project.attempts if r.outcome != "cancelled"]
    assert [segment for segment, *_ in ran] == [0, 1, 2, 3, 0], ran
    # Also what the last run submitted before it looked, and ended then; not what ended in between.
    known = [job for record in project.attempts for job in record.site_jobs]
    assert len(sandbox.record("hpc1")["runs"]) - before <= len(known) <= len(project.attempts)
    assert not [record for record in project.attempts if not record.state.final]


def begun(project: Project, run: Running, number: int) -> None:
    notes = project.workspace / "segments.txt"
    until(
        lambda: (
            run.process.poll() is not None
            or (notes.exists() and len(notes.read_text().splitlines()) > number)
        ),
        "the segment",
    )
    assert run.process.poll() is None, run.output


def test_a_checkpoint_that_was_changed_at_the_site_is_noticed(project: Project) -> None:
    """Also by a segment that is submitted only when the one before has ended."""
    written(project, "200s")
    project.write("train.py", TRAIN.replace("if segment == 0 or", "if"))
    project.workspace.mkdir(parents=True)
    held = project.workspace / "held-0"
    held.touch()
    run = project.start("score.txt", "--mantik-presubmit", "0")
    begun(project, run, 0)
    run.kill()
    held.unlink()
    until(lambda: list(project.workspace.glob(".mantik/attempts/*/*.85")), "the end of the segment")
    (project.workspace / "ckpt/epoch").write_text("7")
    said = project.run(
        "score.txt", "--nolock", "--rerun-incomplete", "--mantik-presubmit", "0"
    ).failed()
    tells(said, "Before segment 2 of 10, the checkpoint was removed or changed", "ckpt/epoch")
    project.run("score.txt", "--nolock", "--rerun-incomplete").ok()
    noted = (project.workspace / "segments.txt").read_text().splitlines()
    assert noted == ["0 10 0", *(f"{n} 10 {2 * n}" for n in range(4))]


def test_without_progress_it_does_not_go_on(project: Project) -> None:
    written(project)
    project.write("train.py", "import sys; sys.exit(85)\n")
    said = project.run("score.txt", "--retries", "0").failed()
    tells(said, "asked to go on, but no file of its checkpoint (ckpt/) has changed", "segment 1 of")
    assert [r.reason for r in project.attempts if r.outcome != "cancelled"] == ["exit_code"]
    assert not [r for r in project.attempts if not r.state.final]


def test_used_up_segments_go_on_when_it_is_started_again(project: Project) -> None:
    written(project, "200s")
    project.write("train.py", TRAIN.replace("if segment == 0 or", "if"))
    alone = ("--mantik-presubmit", "0")
    said = project.run("score.txt", "--set-resources", "train:mantik_continue=3", *alone).failed()
    tells(said, "but this was segment 3 of 3", "mantik_continue", "snakemake --forcerun train")
    project.run("score.txt", *alone).ok()
    noted = (project.workspace / "segments.txt").read_text().split()
    assert noted == [*"030", *"132", *"234", "3", "10", "6"]
    assert (project.workspace / "loss.txt").read_text().split() == [str(n) for n in range(8)]


MISTAKES = {
    "mantik_checkpoint=None": "needs a checkpoint to go on from",
    'mantik_warn="soon"': "has to be a time. Write a whole number",
    'mantik_warn="25s"': "leaves less than half of the walltime",
    'mantik_continue="many"': "has to be a number of segments",
    'mantik_continue_on="bad luck"': "has to name ends after which the job goes on",
    'mantik_checkpoint="../x"': "below the working directory",
}


def test_mistakes_are_reported_before_anything_is_submitted(project: Project) -> None:
    written(project)
    asked = 'resources: runtime=10, mantik_continue=3, mantik_checkpoint="ckpt/"'
    rules = {
        "first": 'group: "both"',
        "grouped": f'input: "first"\ngroup: "both"\n{asked}',
        "full": f'{asked}\nrun: open(output[0], "w").close()',
    }
    for number, mistake in enumerate(MISTAKES):
        name, _, value = mistake.partition("=")
        given = {"mantik_continue": "10", "mantik_checkpoint": '"ckpt/"', name: value}
        rules[f"r{number}"] = f"resources: {', '.join(f'{n}={v}' for n, v in given.items())}"
    project.write("Snakefile", one_rule_each(**rules))
    said = project.run().failed()
    tells(
        said,
        "nothing submitted: invalid resource requests:",
        *MISTAKES.values(),
        "rule grouped has mantik_continue, but a job in a group cannot go on",
        "Take it out of its group",
        "rule full: the resource mantik_continue is not supported for a rule that has run:",
        "Use shell:, or a script: that does not import Snakemake",
    )
    assert not project.workspace.exists()


def test_mistakes_that_depend_on_a_file_are_reported_when_it_is_made(project: Project) -> None:
    continues = "mantik_continue=lambda wildcards, input: int(open(input[0]).read())"
    resources = f'input: "number"\nresources: mantik_checkpoint="ckpt/", {continues}'
    rules = one_rule_each(
        number='shell: "echo 3 > {output}"',
        full=f'{resources}, runtime=10\nrun: open(output[0], "w").close()',
        endless=resources,
    )
    project.write("Snakefile", rules)
    said = project.run("--keep-going", "--retries", "0").failed()
    tells(
        said,
        "the resource mantik_continue is not supported for a rule that has run:",
        "the resource mantik_continue=3 needs a walltime, and there is none",
    )
    assert not project.exists("full")
    assert not project.exists("endless")


DOORS = """
    rule grow:
        output: update("state.txt"), touch("done")
        resources:
            runtime=10, mantik_continue=lambda wildcards, attempt: 3 + attempt,
            mantik_continue_on="time_limit preempted node_fail"
        shell:
            "echo $MANTIK_SEGMENT of $MANTIK_SEGMENTS >> {output[0]};"
            " case $MANTIK_SEGMENT in"
            ' 0) touch "$MANTIK_CONTINUE_FILE" ;;'
            " 1) sleep 600 ;;"
            " 2) exit 85 ;;"
            " esac"
"""


def test_an_updated_output_goes_through_every_door(project: Project, sandbox: Sandbox) -> None:
    """The number of segments comes from a function; a file, a code and a dead node go on."""
    project.write("Snakefile", DOORS)
    project.write("state.txt", "mine\n")
    running = project.start("--forceall", "--retries", "0")
    place = project.workspace / "state.txt"
    until(lambda: place.exists() and "1 of 4" in place.read_text(), "the second segment")
    [record] = [r for r in project.attempts if r.segment == 1 and not r.state.final]
    jobs = sandbox.record("hpc1")["jobs"]
    [number] = next(job["scheduler_ids"] for job in jobs if job["id"] in record.site_jobs)
    sandbox.fail_node("hpc1", number)
    said = running.end().ok().output
    tells(said, "segment 1 of 4 has ended (it asked", "segment 2 of 4 has ended (node failure)")
    assert project.read("state.txt") == "mine\n" + "".join(f"{n} of 4\n" for n in range(4))
