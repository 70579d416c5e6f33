"""Which files of the working directory go up besides a job's inputs."""

import subprocess
import sys
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.exclude import Exclude
from snakemake_executor_plugin_mantik.staging.sources import SourceFiles, Sources

NASTY = "a b'\"\n#%*$HOME`ü;-"


def write(root: Path, *paths: str, size: int = 1) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x" * size)


def chosen(
    root: Path, *exclude: str, products: tuple[str, ...] = (), total: int = 10**6
) -> Sources:
    return SourceFiles(root, Exclude(exclude), products, file_limit=1000).select(total)


def test_small_files_of_every_name(tmp_path: Path) -> None:
    write(tmp_path, "train.py", f"d/{NASTY}", "d/e/f.csv")
    found = chosen(tmp_path)
    assert set(found.paths) == {"train.py", f"d/{NASTY}", "d/e/f.csv"}
    assert found.size == 3


def test_what_stays_here(tmp_path: Path) -> None:
    write(
        tmp_path, "keep.py", ".git/config", ".env", "d/__pycache__/x.pyc", "venv/pyvenv.cfg",
        "venv/lib/x.py", "mlruns/1", "node_modules/x", "out/model", "data/in.csv", "big/x",
        "notes.log",
    )  # fmt: skip
    (tmp_path / "dangling").symlink_to("nowhere")
    found = chosen(tmp_path, "*.log", "big/", products=("out/model", "data"))
    assert found.paths == ("keep.py",)


def test_logs_stay_here(tmp_path: Path) -> None:
    """Those by name, and what this process's own output goes to, whatever it is called."""
    write(tmp_path, "keep.py", "run.log", "nohup.out", "d/old.log", "log.py")
    notify = """if True:
        import sys
        from pathlib import Path
        from snakemake_executor_plugin_mantik.config.exclude import Exclude
        from snakemake_executor_plugin_mantik.staging.sources import SourceFiles
        found = SourceFiles(Path("."), Exclude(()), file_limit=1000).select(9000)
        Path("found").write_text(" ".join(found.paths))
    """
    with (tmp_path / "out.txt").open("w") as out, (tmp_path / "err.txt").open("w") as err:
        command = [sys.executable, "-c", notify]
        subprocess.run(command, cwd=tmp_path, stdout=out, stderr=err, check=True)
    assert (tmp_path / "found").read_text() == "keep.py log.py"


def test_large_files_are_left_out_and_told(tmp_path: Path) -> None:
    write(tmp_path, "large", size=1001)
    write(tmp_path, "just", size=1000)
    why = {"large": "larger than 1000 B"}
    assert chosen(tmp_path) == Sources(("just",), 1000, ("large",), left_out=why)


def test_each_file_that_stays_here_has_a_reason(tmp_path: Path) -> None:
    """The same one whether all are listed or one is asked about."""
    write(
        tmp_path, "keep.py", ".env", ".git/config", "d/.hidden/x", "venv/pyvenv.cfg",
        "node_modules/x", "mlflow.db", "notes.log", "out/model", "in.csv", "big/x", "d/id_rsa",
        "mantik-report.html",
    )  # fmt: skip
    write(tmp_path, "large", size=1001)
    (tmp_path / "dangling").symlink_to("nowhere")
    exclude = Exclude(("big/", "*.dat"))
    files = SourceFiles(tmp_path, exclude, ("out/model", "in.csv"), file_limit=1000)
    found, why = files.select(9000).left_out, files.why_left_out
    assert {path: why.split()[0] for path, why in found.items()} == {
        ".env": "hidden", ".git/": "hidden", "d/.hidden/": "hidden", "venv/": "a",
        "node_modules/": "generated", "mlflow.db": "MLflow's", "notes.log": "named", "big/": "in",
        "d/id_rsa": "it", "large": "larger", "dangling": "no", "mantik-report.html": "a",
    }  # fmt: skip

    assert {path: why(path.rstrip("/")) for path in found} == found
    assert why("keep.py") is why("d") is why("nowhere") is None
    assert why("in.csv") == "read or made by a rule"
    assert why("d/.hidden/x") == why(".git/config") == "hidden"
    assert why("big/x") == found["big/"]


def test_too_much_together(tmp_path: Path) -> None:
    write(tmp_path, *(f"{n}.py" for n in range(5)), size=900)
    with pytest.raises(UserError, match="Exclude"):
        chosen(tmp_path, total=4000)
