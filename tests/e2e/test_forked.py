"""The fork that stands for `python -m snakemake` in most tests behaves as the command does."""

import re

from tests.support.workflows import Project

TELLING = """
    import atexit, os, stat, sys, threading, time, wave
    import beside

    def late():
        time.sleep(0.2)
        print("thread ended", file=sys.stderr)

    if not os.environ.get("QUIET"):
        threading.Thread(target=late).start()
        atexit.register(lambda: print("at exit", file=sys.stderr))
        print(sys.argv, sys.path[0], os.getcwd(), __name__, threading.active_count())
        print(sys.stdin.read() == "", os.isatty(1), sys.stdout.line_buffering, os.umask(0o22))
        print(sorted(k for k in os.environ if k.startswith(("SNAKE", "MANTIK", "OPENBLAS"))))
        print(sys.modules["__main__"].__spec__.name, wave.__name__, os.getppid() == os.getsid(0))
        sys.stdout.flush()

    rule all:
        output: "made"
        shell: "echo $EXTRA > {output}; echo told; [ {config[end]} = well ]"
"""

CHANGING = (
    (r"\d\d:\d\d:\d\d|\d{4}-\d\d-\d\d.*\.log|Workflow ID: .*|Elapsed time: .*", ""),
    (r"PID \d+", ""),
)


def said(project: Project, *arguments: str) -> tuple[int, list[str], str]:
    ran = project.run(*arguments, local=True)
    text = ran.output
    for pattern, instead in CHANGING:
        text = re.sub(pattern, instead, text)
    made = project.read("made") if project.exists("made") else ""
    (project.directory / "made").unlink(missing_ok=True)
    return ran.code, sorted(text.splitlines()), made


def test_says_and_does_the_same(project: Project) -> None:
    project.write("Snakefile", TELLING)
    project.write("beside.py", "value = 1\n")
    project.extra["EXTRA"] = "ü"
    told = {}
    for forked in (True, False):
        project.forked = forked
        told[forked] = said(project, "--nolock", "--keep-incomplete", "--config", "end=badly")
    assert told[True] == told[False]
    code, _, made = told[True]
    assert (code, made) == (1, "ü\n")
    project.forked = True
    assert project.run("--no-such-option").code == 2


def test_another_start_needs_another_process(project: Project) -> None:
    project.write("Snakefile", 'import sys\nprint("hash", sys.flags.hash_randomization)\n')
    project.extra["PYTHONHASHSEED"] = "0"
    assert "hash 0" in project.run(local=True).output
