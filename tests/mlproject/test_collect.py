"""What a run without named outputs has made is found, whatever dates and links it has."""

import os
import subprocess
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik import mlproject
from snakemake_executor_plugin_mantik.mlproject.single_rule import collect_outputs

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
