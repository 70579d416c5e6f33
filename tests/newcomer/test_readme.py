"""What a newcomer types, as README.md has it, on a machine that knows nothing of this project.

The commands run word by word in a shell with an empty home, empty caches and the system's search
path. Only the address that is cloned leads to this checkout's last commit.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text()

KEPT = re.compile(
    r"PIP_\w+|UV_\w+|\w*_proxy|SSL_CERT_\w+|\w*CA_BUNDLE|LANG|LC_\w+|CI|TERM", re.IGNORECASE
)
"""How this machine reaches its package index: the only thing that a newcomer's has in common."""

SAMPLE = "-n 2 tests/e2e/test_undeclared.py tests/tracking/test_values.py"
"""The whole of `make test` runs beside this; here it is seen that it starts on such a machine."""


@dataclass(frozen=True)
class Newcomer:
    """An account that has just been made.

    Attributes:
        home: its home, with nothing but what the commands have left there.
        environment: all variables of its shell.
    """

    home: Path
    environment: Mapping[str, str]

    def types(self, commands: str, where: Path | None = None) -> str:
        """What the commands say; they have to succeed."""
        ended = subprocess.run(
            ["bash", "-e"], input=commands, cwd=where or self.home, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1200, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{commands}\n{ended.stdout[-8000:]}"
        return ended.stdout


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    root = tmp_path_factory.mktemp("newcomer")
    places = {name: root / name for name in ("home", "tmp", "bin")}
    for place in places.values():
        place.mkdir()
    # The system's Python may be older than what is needed, and newer ones lie anywhere.
    (places["bin"] / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    address = re.search(r"git clone (\S+)", README)
    assert address is not None
    environment = {
        **kept,
        "HOME": str(places["home"]),
        "TMPDIR": str(places["tmp"]),
        "PATH": f"{places['bin']}:/usr/local/bin:/usr/bin:/bin",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{CHECKOUT}.insteadOf",
        "GIT_CONFIG_VALUE_0": address[1],
    }
    return Newcomer(places["home"], environment)


def block(heading: str) -> str:
    """The first block of commands below a heading of the README."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.search(r"(?:^    .*\n)+", section, re.MULTILINE)
    assert lines is not None
    return lines[0]


def test_first_minute(newcomer: Newcomer) -> None:
    commands = block("Try it, in one command")
    assert commands.split()[:2] == ["git", "clone"]
    assert commands.split()[-2:] == ["make", "demo"]

    said = newcomer.types(commands)

    clone = newcomer.home / "snakemake-executor-plugin-mantik"
    results = clone / "workflows" / "digits" / "results"
    assert (results / "report.png").read_bytes().startswith(b"\x89PNG")
    # Nineteen jobs, eight of them trainings with a run each, as the README says.
    assert len(re.findall(r"succeeded *$", said, re.MULTILINE)) == 19, said
    assert said.count("FINISHED") == 8, said
    assert re.search(r"/#/experiments/\d+/runs\n", said), said
    report = (clone / "workflows" / "digits" / "mantik-report.html").read_text()
    assert re.search(r"<b>[^–<]+</b>core hours", report)

    assert "no job was submitted" in newcomer.types("make demo", clone)
    next((results / "models").iterdir()).unlink()
    branch = newcomer.types("make demo", clone)
    assert 1 < len(re.findall(r"succeeded *$", branch, re.MULTILINE)) < 6, branch


def test_contributor(newcomer: Newcomer) -> None:
    clone = newcomer.home / "snakemake-executor-plugin-mantik"
    said = newcomer.types(f"make test PYTEST_ARGS='{SAMPLE}'", clone)
    assert re.search(r"\d+ passed", said)
    assert "failed" not in said
    # What is made by tests is not left in the checkout.
    assert newcomer.types("git status --porcelain", clone) == ""
