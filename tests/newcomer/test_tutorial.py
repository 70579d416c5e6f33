"""docs/tutorial.md: its files are written and its commands typed as they are printed, in order.

The commands typed here are indented on the page. Those in fenced blocks are not: they install what
this Python has, or need a real site. What is marked as text is shown by a command.
"""

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tests.support.workflows import FOREIGN, tells

PAGE = (Path(__file__).parents[2] / "docs/tutorial.md").read_text()
WAIT_S = 800.0


def typed() -> Iterator[str]:
    """Yield what a reader types, files as here-documents. A mistake ends every shell."""
    yield "set -e\n"
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$|((?:^    [^\n]*\n)+)", PAGE, re.M | re.S):
        language, text, commands = match.groups()
        if commands:
            yield re.sub("^    ", "", commands, flags=re.M)
            yield "set -e\n" if "-- bash" in commands else ""
        elif language not in {"bash", "text"}:
            name = text.splitlines()[0].removeprefix("# ")
            yield f"mkdir -p $(dirname {name})\ncat > {name} <<'END OF FILE'\n{text}END OF FILE\n"


def unsized(text: str) -> str:
    """Return a text without blanks at ends of lines and sizes, which depend on a path."""
    return re.sub(r" +$", "", re.sub(r"\d\.\d KiB", "", text), flags=re.M)


def test_each_command_works(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash"], cwd=tmp_path, env=environment, input="".join(typed()), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=WAIT_S, check=False,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0, said
    directory = tmp_path / "tutorial"
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
    first, second = [text for language, text in blocks if not language]
    (plan,) = [text for language, text in blocks if language == "text"]
    assert first in said
    assert unsized(plan) in unsized(said)
    assert (directory / "best.txt").read_text() == second
    tells(said, "hpc2: 2 jobs, at most 0.3 core hours", "prepare: done at hpc1", "hpc2: removed.")
    assert said.count("train rate=0.1: done at hpc2") == said.count("train rate=1.0: done at") == 1
    assert (directory / "mantik-report.html").exists()
    with closing(sqlite3.connect(directory / "mlflow.db")) as runs:
        logged = runs.execute("SELECT count(*) FROM metrics WHERE key = 'loss'").fetchone()
    assert logged == (3 * 30,)
