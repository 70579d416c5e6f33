"""What starts a Snakemake at a site: which one it takes, and what it compares."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.rules.onsite import nested_snakemake


def test_which_snakemake_fits() -> None:
    found = "9.27.1", "9.27.0", "9.28.3", "9.26.9", "10.0.0", "8.99.0", "", "nonsense"
    assert [nested_snakemake.fits(one, "9.27.1") for one in found] == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (["a", "b"], ["a", "b"], ""),
        ([], [], ""),
        (["a"], ["a", "b"], "lacks b"),
        (["a", "b", "c"], ["a", "b"], "has also c"),
        (["b", "a"], ["a", "b"], "is in another order"),
        (["/cache/1/x", "a"], [None, "a"], ""),
        (["/cache/1/x", "a", "b"], [None, "a"], "has also b"),
        ([], [None, "a"], "lacks a"),
        (["a"] * 9, [*"bcdefghij"], "lacks b, c, d, e, f, …"),
    ],
)
def test_files_are_compared(there: list[str], here: list[str | None], said: str) -> None:
    told = nested_snakemake.differing("input", there, here)
    assert said in told
    assert bool(told) is bool(said)


def order_for(rule: str, pythons: list[str]) -> dict[str, object]:
    """What the program is told of a rule without wildcards, which makes `out.txt` of nothing."""
    return {
        "snakemake": "9.27.0", "pythons": pythons, "packages": [], "do": "Do this.",
        "rules": [rule], "input": [], "output": ["out.txt"], "cache": {}, "checkpointed": [],
        "repositories": [], "copies": None, "beginning": "",
        "arguments": [
            "--snakefile", "Snakefile", "--executor", "local", "--mode", "subprocess",
            "--cores", "1", "--allowed-rules", rule, "--force-use-threads",
            "--target-jobs", f"{rule}:",
        ],
    }  # fmt: skip


def test_an_older_python_is_told_and_another_one_taken(tmp_path: Path) -> None:
    """The first Python has no Snakemake, the second one has."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    (tmp_path / "Snakefile").write_text(
        'rule out:\n    output: "out.txt"\n    run:\n        open(output[0], "w").close()\n'
    )
    order = order_for("out", ["no-such-python", sys.executable])

    def start(**changes: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(bare / "bin" / "python"), nested_snakemake.__file__],
            input=json.dumps({**order, **changes}), cwd=tmp_path, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    lacking = start(pythons=["no-such-python"])
    assert lacking.returncode == nested_snakemake.UNFIT
    assert lacking.stdout.startswith(nested_snakemake.LACK)
    assert "has none. Do this." in lacking.stdout
    unknown = start(packages=["no_such_package"])
    assert unknown.returncode == nested_snakemake.UNFIT
    assert "has no no_such_package, which the workflow uses. Do this." in unknown.stdout
    ran = start()
    assert ran.returncode == 0, ran.stdout
    assert (tmp_path / "out.txt").exists()


CWLTOOL = f"""\
#!{sys.executable}
import shutil, sys, urllib.parse
# As the real one it takes only this form of an address.
assert sys.argv[1].startswith("file:///"), f"Reference {{sys.argv[1]!r}} is not in the index."
shutil.copy(urllib.parse.unquote(sys.argv[1][7:]), "out.txt")
"""


def test_cwltool_is_told_an_address_that_it_takes(tmp_path: Path) -> None:
    place = tmp_path / "a place"
    place.mkdir()
    (place / "tool ü.cwl").write_text("a tool\n")
    (place / "Snakefile").write_text('rule tool:\n    output: "out.txt"\n    cwl: "tool ü.cwl"\n')
    (tmp_path / "cwltool").write_text(CWLTOOL)
    (tmp_path / "cwltool").chmod(0o700)

    ran = subprocess.run(
        [sys.executable, nested_snakemake.__file__],
        input=json.dumps(order_for("tool", [])), cwd=place, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip

    assert ran.returncode == 0, ran.stdout
    assert (place / "out.txt").read_text() == "a tool\n"
