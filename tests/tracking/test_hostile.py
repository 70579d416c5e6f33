"""Whatever a job writes into its store, its run says how it ended, and the rest comes over."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.tracking import recorded
from snakemake_executor_plugin_mantik.tracking.recorded import MAX_YAML_DEPTH, read_mapping
from snakemake_executor_plugin_mantik.tracking.registered import _rename
from tests.tracking.test_replay import (  # noqa: F401 - fixtures, too
    SOURCE,
    Replayed,
    store,
    target,
    told,
)

BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n"
    for before, name in zip("abcdef", "bcdefg", strict=True)
)
DEEP = "name: " + "[" * 100_000


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def in_run(name: str, content: str | bytes) -> Callable[[Path], None]:
    return lambda at: write(at / "7" / SOURCE / name, content)


def in_models(name: str, content: str | bytes) -> Callable[[Path], None]:
    def act(at: Path) -> None:
        (model,) = (at / "7" / "models").iterdir()
        write(model / name, content)

    return act


def inner(name: str, content: str | bytes) -> Callable[[Path], None]:
    def act(at: Path) -> None:
        runs = (p.parent for p in at.glob("7/*/meta.yaml") if p.parent.name != SOURCE)
        write(next(runs) / name, content)

    return act


def in_place_of_inputs(at: Path) -> None:
    shutil.rmtree(at / "7" / SOURCE / "inputs")
    write(at / "7" / SOURCE / "inputs", "1")


# Each store takes seconds: what does not get in each other's way is in one.
HOSTILE: dict[str, list[Callable[[Path], None]]] = {
    "values": [
        in_run("params/\x1b[31mred", "1"),
        in_run("params/a/../b/x", "1"),
        in_run("params/bytes", b"\xff\xfe"),
        in_run("params/long", "x" * (recorded.LONGEST_VALUE + 1)),
        in_run("tags/a\nb", "1"),
        in_run("metrics/a;b", "1 1 1\n"),
        in_run("metrics/beyond", f"{1 << 70} 1 1\n1 1 {1 << 70}\n1 1e999 1\n"),
        in_run("metrics/m", b"1" * 1_000_000),
        in_run("meta.yaml", DEEP),
        inner("tags/mantik.key", "somebody's"),
        in_models("meta.yaml", DEEP),
        in_run("inputs/x/meta.yaml", "{["),
        lambda at: write(at / "7" / "datasets" / "d" / "meta.yaml", DEEP),
    ],
    "a description that explodes": [
        in_run("meta.yaml", BOMB),
        in_models("meta.yaml", "x: 1\n"),
        in_run("outputs/x/meta.yaml", "x: 1\n"),
    ],
    "descriptions of others": [
        in_run("meta.yaml", "run_id: x\nexperiment_id: '9'\n"),
        in_models(
            "meta.yaml", "model_id: ../../../../precious\nexperiment_id: '7'\nname: n\nstatus: 2\n"
        ),
        lambda at: write(at / "x" / "meta.yaml", "experiment_id: /\nname: [a]\n"),
    ],
    "an odd state, a file for a directory": [
        inner("meta.yaml", "status: 99\nrun_id: 5\n"), in_place_of_inputs,
    ],
    "a directory for a file": [
        lambda at: (at / "7" / SOURCE / "meta.yaml").unlink(), in_run("meta.yaml/x", "1"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_the_rest_comes_over(
    told: Replayed, what: str, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    precious = tmp_path / "precious" / "artifacts" / "MLmodel"
    write(precious, "model_id: mine\n")
    for spoil in HOSTILE[what]:
        spoil(told.store)
    write(told.store / "7" / SOURCE / "tags" / "lines", b"of\r\nWindows\r")

    told.replay()

    run = told.client.get_run(told.run_id)
    assert run.data.tags["lines"] == "of\r\nWindows\r"
    assert (run.data.metrics["loss/a"], run.data.params["depth"]) == (0.2, "3")
    assert "plots" in {file.path for file in told.client.list_artifacts(told.run_id)}
    assert precious.read_text() == "model_id: mine\n"
    runs = told.client.search_runs([told.experiment_id])
    assert {"inner", "open"} & {r.info.run_name for r in runs}, "one of them is whole"
    assert not [r for r in runs if "mantik.key" in r.data.tags]


def test_a_run_of_somebody_else_gets_no_child(told: Replayed) -> None:  # noqa: F811
    other = told.client.create_run(told.experiment_id).info.run_id
    inner("tags/mlflow.parentRunId", other)(told.store)

    told.replay()

    parents = [
        run.data.tags.get("mlflow.parentRunId")
        for run in told.client.search_runs([told.experiment_id])
    ]
    assert told.run_id in parents
    assert other not in parents


def test_parameters_without_number(
    told: Replayed, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr(recorded, "MOST_VALUES", 20_000)
    for number in range(100):
        in_run(f"params/p{number:03}", "1")(told.store)

    told.replay()

    assert 5 < len(told.client.get_run(told.run_id).data.params) < 30
    assert "there are too many" in " ".join(told.said)


def test_a_models_own_description(tmp_path: Path) -> None:
    for content in (DEEP, "a: [", "- x", "\xff"):
        write(tmp_path / "MLmodel", content)
        _rename(tmp_path / "MLmodel", {"model_id": "new"})
        assert (tmp_path / "MLmodel").read_text() == content
    write(tmp_path / "MLmodel", "model_id: old\na: &a [1]\nb: *a\n")
    _rename(tmp_path / "MLmodel", {"model_id": "new"})
    assert read_mapping(tmp_path / "MLmodel", aliases=True) == {
        "model_id": "new",
        "a": [1],
        "b": [1],
    }


def test_what_is_read(tmp_path: Path) -> None:
    assert read_mapping(Path("/dev/zero")) is None
    assert read_mapping(Path("/nowhere")) is None
    file = tmp_path / "meta.yaml"
    write(file, "a: " + "[" * (MAX_YAML_DEPTH - 1) + "]" * (MAX_YAML_DEPTH - 1))
    assert read_mapping(file)
    write(file, "a: " + "[" * MAX_YAML_DEPTH + "]" * MAX_YAML_DEPTH)
    assert read_mapping(file) is None
