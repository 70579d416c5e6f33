"""Loading, the parameters of a rule, and what changes a definition."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest

from snakemake_executor_plugin_mantik import mlproject
from snakemake_executor_plugin_mantik.common.errors import ConfigError, UserError
from snakemake_executor_plugin_mantik.mlproject.single_rule import collect_outputs

MLPROJECT = """\
entry_points:
  main:
    parameters: {alpha: float}
    command: "echo {alpha}"
  other:
    command: "true"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "it's #%ü"
    (made / "lib").mkdir(parents=True)
    (made / "MLproject").write_text(MLPROJECT)
    (made / "train.py").write_text("import lib\n")
    (made / "lib/__init__.py").write_text("X = 1\n")
    return made


def definition(folder: Path, name: str = "main", **options: Any) -> str:
    project = mlproject.load(folder, **options)
    return project.definition(project.entry_points[name])


def test_what_a_rule_gets(folder: Path) -> None:
    project = mlproject.load(folder)
    assert project.name == folder.name

    params = project.entry_point("main", alpha="{wildcards.a}")

    assert set(params) == {
        "command", "entry_point", "definition", "arguments", "project", "call",
    }  # fmt: skip
    wildcards = SimpleNamespace(a="0.5")
    assert params["entry_point"](wildcards) == "main"
    assert params["arguments"](wildcards) == {"alpha": "0.5"}
    assert params["definition"](wildcards) == definition(folder)
    call = params["call"](wildcards, input=[], output=[])
    assert isinstance(call, mlproject.Call)
    assert call.entry_point == "main"
    assert call.arguments == {"alpha": "0.5"}


def test_the_file_may_be_named(folder: Path) -> None:
    assert mlproject.load(folder / "MLproject").folder == folder


def test_relative_to_the_file_that_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    code = compile("found = load('sub/p')", str(folder.parent / "Snakefile"), "exec")
    (folder.parent / "sub").mkdir()
    folder.rename(folder.parent / "sub/p")
    names = {"load": mlproject.load}
    exec(code, names)
    assert names["found"].folder == folder.parent / "sub/p"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["train.py", "lib/__init__.py"])
def test_scripts_take_any_parameter(folder: Path, name: str) -> None:
    params = mlproject.load(folder).entry_point(name, rate=0.5)
    command = params["command"](SimpleNamespace(), input=[], output=[])
    assert command.endswith(f"\npython {name} --rate 0.5")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mian", r"no entry point 'mian' \(did you mean main\?\), and it is no script"),
        ("gone.py", r"there is no script 'gone.py'"),
        ("a\0.py", "there is no script"),
    ],
)
def test_entry_points_that_are_none(folder: Path, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        mlproject.load(folder).entry_point(name)
    (folder / "MLproject").unlink()
    with pytest.raises(ConfigError):
        mlproject.load(folder).entry_point(name)


def test_what_changes_a_definition(folder: Path) -> None:
    def changes(path: str, text: str = "x") -> bool:
        before = definition(folder)
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return definition(folder) != before

    assert changes("lib/__init__.py", "X = 2\n")
    assert changes("new.py")
    assert changes("MLproject", MLPROJECT.replace("echo", "echo -n"))
    (folder / "train.py").chmod(0o755)
    assert not changes("new.py"), "the same content"
    for path in (
        "__pycache__/a.pyc", ".git/HEAD", "mlruns/0/meta.yaml", "mlflow.db", "Snakefile", "a.smk",
    ):  # fmt: skip
        assert not changes(path), path
    edited = MLPROJECT.replace("echo", "echo -n").replace('"true"', '"false"')
    assert not changes("MLproject", f"# x\n{edited}")
    os.utime(folder / "train.py")
    assert not changes("new.py")


def test_the_same_size_and_time_hide_no_change(folder: Path) -> None:
    before = definition(folder)
    status = (folder / "train.py").stat()
    (folder / "train.py").write_text("import bil\n")
    os.utime(folder / "train.py", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert definition(folder) != before


def test_a_name_and_a_content_are_told_apart(tmp_path: Path) -> None:
    for name, files in {"a": {"x": "y"}, "b": {"x": "", "y": ""}, "c": {"xy": ""}}.items():
        (tmp_path / name).mkdir()
        for path, text in files.items():
            (tmp_path / name / path).write_text(text)
    assert len({mlproject.project.project_digest(tmp_path / name, None) for name in "abc"}) == 3


def test_exclude(folder: Path) -> None:
    before = definition(folder, exclude=["data/", "*.log"])
    (folder / "data").mkdir()
    (folder / "data/x.csv").write_text("x")
    (folder / "a.log").write_text("x")
    assert definition(folder, exclude=["data/", "*.log"]) == before
    assert definition(folder) != before
    with pytest.raises(UserError, match="absolute"):
        definition(folder, exclude=["/x"])


def test_too_much_is_told_and_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = definition(folder)
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(50 << 30)
    assert definition(folder) == before
    monkeypatch.setattr(mlproject.project, "TOTAL_LIMIT", 10)
    with pytest.raises(UserError, match="are larger than"):
        definition(folder)


def test_importing_is_cheap() -> None:
    code = (
        "import sys, snakemake_executor_plugin_mantik.mlproject\n"
        "heavy = {'mlflow', 'pydantic', 'httpx', 'pathspec', 'snakemake', 'pyunicore', 'jinja2',"
        " 'typer', 'ruamel'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_rule_is_in_every_kind_of_install(tmp_path: Path) -> None:
    assert Path(mlproject.RULE).is_file()
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path)]
    subprocess.run([*command, str(Path(__file__).parents[2])], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        assert "snakemake_executor_plugin_mantik/mlproject/rule.smk" in archive.namelist()


# What a run without named outputs has made is found, whatever dates and links it has.


COMMAND = r"""
echo changed > old.txt && chmod +x run.sh
mkdir -p model && tar -xf w.tar -C model && tar -xf dated.tar
cp -p w.tar 'a copy.tar' && mv moved new
echo 2 > 'epoch 2.ckpt' && ln -s 'epoch 2.ckpt' last.ckpt && ln -s "$PWD/epoch 2.ckpt" absolute.ckpt
mkdir -p hub/blobs hub/snapshots/main .cache/blobs
echo blob > hub/blobs/1 && ln -s ../../blobs/1 hub/snapshots/main/config.json
echo cached > .cache/blobs/2 && ln -s .cache/blobs/2 cached.bin && ln -s .cache/blobs whole
ln -s ../outside/data.bin out.bin && ln -s ../outside outside && ln -s nowhere dangling
ln -s kept.txt alias.txt && touch "$(printf 'n\nl')"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "it's p"
    (project / "moved").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/data.bin").write_text("data")
    (project / "dated").mkdir()
    for name in ("w.bin", "dated/d.bin", "old.txt", "kept.txt", "moved/m.txt", "run.sh"):
        (project / name).write_text("before\n")
        os.utime(project / name, (10**9, 10**9))
    os.utime(project / "dated", (10**9, 10**9))
    for archive, what in (("w.tar", "w.bin"), ("dated.tar", "dated")):
        subprocess.run(["tar", "-cf", archive, "--remove-files", what], cwd=project, check=True)
    command = COMMAND.strip().replace("\n", " && ")
    (project / "MLproject").write_text(
        f"name: p\nentry_points:\n  main:\n    command: {'bash c'!r}\n"
    )
    (project / "c").write_text(command)
    monkeypatch.chdir(tmp_path)
    return project


def test_all_that_is_new_comes(project: Path) -> None:
    params = collect_outputs(mlproject.load(project).entry_point("main"), "out put/r")
    text = params["command"](None)

    subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)

    out = Path("out put/r")
    made = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if not path.is_dir()}
    links = {name: os.readlink(path) for name, path in made.items() if path.is_symlink()}
    assert links == {
        "last.ckpt": "epoch 2.ckpt",
        "hub/snapshots/main/config.json": "../../blobs/1",
        "dangling": "nowhere",
        "outside": "../outside",
    }
    texts = {name: path.read_text() for name, path in made.items() if path.is_file()}
    copy = texts.pop("a copy.tar", None)
    assert copy is not None
    assert texts == {
        "old.txt": "changed\n", "run.sh": "before\n", "model/w.bin": "before\n",
        "dated/d.bin": "before\n", "new/m.txt": "before\n", "epoch 2.ckpt": "2\n",
        "last.ckpt": "2\n", "absolute.ckpt": "2\n", "hub/blobs/1": "blob\n",
        "hub/snapshots/main/config.json": "blob\n", "cached.bin": "cached\n",
        "whole/2": "cached\n", "out.bin": "data", "alias.txt": "before\n", "n\nl": "",
    }  # fmt: skip
