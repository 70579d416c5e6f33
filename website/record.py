"""Make the pictures of the README from a real run of the demo.

    .venv/bin/python -m website.record

It runs a copy of workflows/digits at two sandbox sites, in a terminal of 80 columns, and writes
into `docs/pictures`: `run.svg`, the recording of that terminal, `pipeline.svg` and `timeline.svg`,
as the report draws them, and `sites.svg`, the pipeline with a box for each rule.
"""

import codecs
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from snakemake_executor_plugin_mantik.common.humanize import humanize_duration
from snakemake_executor_plugin_mantik.views import render_pipeline, render_timeline
from snakemake_executor_plugin_mantik.views.report import gather_report
from website.terminal import COLUMNS, ROWS, Event, play, render, shorten_waits

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
DEMO = "workflows/digits"
SITES = {"hpc1": "unicore", "hpc2": "firecrest"}
INSIDE = "--inside"
LONGEST_S = 0.8
LENGTH_S = 24.0
"""The longest wait that is shown, and the length of the recording, seconds."""
PROFILE = """\
executor: mantik
jobs: 8
mantik-backend-config: [hpc1.yaml, hpc2.yaml]
set-resources: ["train:mantik_site=hpc2"]
quiet: [rules, host]
nolock: true
rerun-incomplete: true
"""


def main() -> int:
    """Start the sandbox around this script's second half; return its exit code."""
    if INSIDE in sys.argv[1:]:
        return inside(Path.cwd())
    with tempfile.TemporaryDirectory(prefix="digits-") as directory:
        copy = Path(directory) / "digits"
        listed = subprocess.check_output(["git", "ls-files", "-z", DEMO], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            target = copy / Path(name).relative_to(DEMO)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        sites = [word for name, api in SITES.items() for word in ("--site", f"{name}={api}")]
        command = ["-m", "snakemake_executor_plugin_mantik", "sandbox", "run", *sites, "--"]
        environment = {n: v for n, v in os.environ.items() if not n.startswith("MLFLOW_")}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment["PYTHONPATH"] = str(ROOT)
        environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{directory}/mlflow.db"
        return subprocess.run(
            [sys.executable, *command, sys.executable, "-m", "website.record", INSIDE],
            cwd=copy, env=environment, check=False,
        ).returncode  # fmt: skip


def inside(workflow: Path) -> int:
    """Record the run at the sandbox's sites and draw it; return its exit code."""
    for site in SITES:
        config = Path(os.environ["MANTIK_SANDBOX_DIR"], f"{site}.yaml").read_text()
        Path(f"{site}.yaml").write_text(f"{config}\nEnvironment:\n  Python: {sys.prefix}\n")
    profile = Path("profiles/default/config.yaml")
    profile.parent.mkdir(parents=True)
    profile.write_text(PROFILE)

    code, events = record(["snakemake"], os.environ | {"TERM": "xterm-256color"})
    if code:
        sys.stderr.write("".join(event.text for event in events))
        return code
    took = events[-1].at
    shown = shorten_waits(play(events), LONGEST_S, LENGTH_S)
    title = f"19 jobs at two sites: {humanize_duration(took)}, shown in {shown[-1].at:.0f} s"
    (PICTURES / "run.svg").write_text(render(shown, f"{title}; waits are shortened"))

    picture = gather_report(workflow, every=False, secrets=[], warn=print).picture
    save("pipeline.svg", render_pipeline(picture))
    save("timeline.svg", render_timeline(picture))
    # Without edges between jobs it draws the rules; `all` runs nowhere.
    jobs = tuple(node for node in picture.nodes if node.site)
    save("sites.svg", render_pipeline(replace(picture, nodes=jobs, edges=())))
    return 0


def save(name: str, svg: str) -> None:
    """Write a drawing for a page that shows it as an image: that has no pane to scroll in."""
    size = re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', svg)
    assert size is not None
    width, height = size.groups()
    (PICTURES / name).write_text(
        re.sub(r' style="[^"]*"', f' width="{width}" height="{height}"', svg, count=1)
    )


def record(words: list[str], environment: Mapping[str, str]) -> tuple[int, list[Event]]:
    """Run a command in a terminal of its own; return its exit code and what it wrote, and when."""
    events = [Event(0.4, "\x1b[1m$ ")]
    events += [Event(0.5 + 0.08 * at, letter) for at, letter in enumerate(" ".join(words))]
    typed = events[-1].at + 0.4
    events.append(Event(typed, "\x1b[0m\r\n"))
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(words[0], words, environment)  # noqa: S606 - no shell is wanted
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    begun = time.monotonic() - typed
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    # Linux reports with an error that nobody has the terminal open any more.
    with suppress(OSError):
        while written := os.read(terminal, 65536):
            events.append(Event(time.monotonic() - begun, decoder.decode(written)))
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), events


if __name__ == "__main__":
    sys.exit(main())
