"""What a job's things are called at its site."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake.iocontainers import InputFiles, Log, OutputFiles, Params

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.rules.paths.job_paths import JobPaths
from snakemake_executor_plugin_mantik.rules.paths.path_rewriting import (
    RewrittenPaths,
    rewrite_paths,
)

NOTHING_STAYS = SimpleNamespace(storage_registry=SimpleNamespace(_storages={}))

ABOVE = "/w/up3/up2/up1"
W = f"{ABOVE}/workdir"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a working directory `run` in it, where the process is."""
    for folder in ("run/in", "data/tree/leaf"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setenv("HOME", str(tmp_path / "run"))
    return tmp_path


def seen(
    root: Path,
    inputs: list[str],
    outputs: list[str] | None = None,
    again: Callable[..., dict[str, Any]] | None = None,
    **params: Any,
) -> RewrittenPaths:
    """The things of a job; `again` makes its parameters of given inputs and outputs."""

    def expand(wildcards: object, made: Any, output: Any, job: object) -> tuple[Params, list[Any]]:
        return Params(fromdict=again(made, output) if again else params), []

    made, output = InputFiles(inputs), OutputFiles(outputs or [])
    job = SimpleNamespace(
        input=made,
        output=output,
        log=Log(["log.txt"]),
        params=Params(fromdict=again(made, output) if again else params),
        wildcards_dict={},
        rule=SimpleNamespace(name="r", expand_params=expand, workflow=NOTHING_STAYS),
    )
    return rewrite_paths(job, JobPaths(root / "run", lambda: W))


def test_texts(root: Path) -> None:
    folder, out = f"{root}/data", f"{ABOVE}/data"
    text = seen(root, [f"{folder}/x.csv", f"{folder}/tree", "../up/y.csv", "/usr/share/s"]).text

    for before, after in {
        f"cat {folder}/x.csv": f"cat {out}/x.csv",
        f"-i{folder}/x.csv -I {folder}": f"-i{folder}/x.csv -I {out}",
        f"a -I{folder}/tree/leaf": f"a -I{out}/tree/leaf",
        f"--in={folder}/x.csv:'{folder}/x.csv.idx'": f"--in={out}/x.csv:'{out}/x.csv.idx'",
        f"file://{folder}/x.csv": f"file://{out}/x.csv",
        f"ls {folder}/*; ls {folder}/; ls {folder}": f"ls {out}/*; ls {out}/; ls {out}",
        f"ls {folder}base/x.csv .{folder}/x.csv": f"ls {folder}base/x.csv .{folder}/x.csv",
        f"$A{folder}/x ${{A}}{folder}/x": f"$A{folder}/x ${{A}}{folder}/x",
        f"$(a){folder}/x *{folder}/x": f"$(a){folder}/x *{folder}/x",
        "cat ../up/y.csv ../up/z >../up": "cat ../up/y.csv ../up/z >../up",
        "cat ../../up/y.csv a/../up/y.csv ../upper": "cat ../../up/y.csv a/../up/y.csv ../upper",
        f"python {root}/run/a.py {root}/running": f"python {W}/a.py {root}/running",
        f"cd {root}/run": f"cd {W}",
        f"{root}/run/../code/x {root}/run/in/../a.py": f"{root}/code/x {W}/a.py",
        f"ls {root}/run/..; ls {root}/run/..in": f"ls {root}; ls {W}/..in",
        "ls /usr/share/s /usr/share/t /usr/share": (
            f"ls {W}/.mantik/outside/usr/share/s /usr/share/t /usr/share"
        ),
        f"ls {W}/data": f"ls {W}/data",
    }.items():
        assert text(before) == after
        assert text(after) == after


def test_only_what_is_beside_it_of_a_directory_that_holds_much_else(root: Path) -> None:
    out = ABOVE
    text = seen(root, [f"{root}/x.csv", "../z.csv"]).text
    assert text(f"cat {root}/x.csv {root}/x.idx") == f"cat {out}/x.csv {out}/x.idx"
    assert text(f"{root}/bin/tool {root}/run/a") == f"{root}/bin/tool {W}/a"
    assert text("cat ../z.csv ../y.csv; ls ..") == "cat ../z.csv ../y.csv; ls .."


def test_lists_keep_their_names(root: Path) -> None:
    job = seen(root, ["../data/x", "in/y"], ["/out/z"])
    assert list(job.input) == ["../data/x", "in/y"]
    assert list(job.output) == [f"{W}/.mantik/outside/out/z"]
    assert isinstance(job.input, InputFiles)
    assert list(job.log) == ["log.txt"]


def test_a_path_upwards_is_not_certain_in_another_directory(root: Path) -> None:
    far = "../../../../data/x"
    text = seen(root, ["../data/x", far, "/far/x"]).text
    with pytest.raises(UserError, match=r"changes its directory and names \.\./\.\."):
        text(f"cd in; cat {far}")
    assert text("cd in; cat ../../data/x") == "cd in; cat ../../data/x"
    assert text("cd in; cat /far/x") == f"cd in; cat {W}/.mantik/outside/far/x"
    assert text(f"cat {far}; ls abcd x") != f"cat {far}; ls abcd x"


def test_parameters_of_texts(root: Path) -> None:
    class Value:
        pass

    value = Value()
    out = f"{W}/.mantik/outside/far"
    params = seen(
        root, ["/far/x"], one="/far/x", many=["/far/x", 1], path=Path("/far/y"),
        named={"a": ("/far",)}, value=value, own=f"{root}/run/in",
    ).params  # fmt: skip
    assert dict(params.items()) == {
        "one": f"{out}/x", "many": [f"{out}/x", 1], "path": Path(f"{out}/y"),
        "named": {"a": (out,)}, "value": value, "own": f"{W}/in",
    }  # fmt: skip


def test_parameters_that_are_made_of_paths(root: Path) -> None:
    (root / "far").mkdir()
    (root / "far/x").write_text("text")

    def again(made: Any, output: Any) -> dict[str, Any]:
        return {
            "above": os.path.dirname(os.path.dirname(made[0])),
            "there": os.path.exists(made[0]),
            "up": os.path.dirname(output[0]),
            "name": os.path.basename(made[0]),
            "from_below": os.path.relpath(output[0], "in"),
        }

    params = seen(root, [f"{root}/far/x"], ["../x"], again).params

    assert dict(params.items()) == {
        "above": ABOVE,
        "there": True,
        "up": "..",
        "name": "x",
        "from_below": "../../x",
    }


def test_nothing_moved_is_the_same(root: Path) -> None:
    job = seen(root, ["in/x"], value="/far/x")
    assert dict(job.params.items()) == {"value": "/far/x"}
    assert job.text("cat ../x /far/x") == "cat ../x /far/x"
