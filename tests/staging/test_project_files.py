"""Which files of the working directory go up besides a job's inputs."""

import subprocess
import sys
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.exclude import Exclude
from snakemake_executor_plugin_mantik.staging.project_files import (
    ProjectFileFilter,
    ProjectFiles,
    missed_files,
)

NASTY = "a b'\"\n#%*$HOME`ü;-"


def write(root: Path, *paths: str, size: int = 1) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x" * size)


def chosen(
    root: Path, *exclude: str, products: tuple[str, ...] = (), total: int = 10**6
) -> ProjectFiles:
    return ProjectFileFilter(root, Exclude(exclude), products, file_limit=1000).select(total)


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
        from snakemake_executor_plugin_mantik.staging.project_files import ProjectFileFilter
        found = ProjectFileFilter(Path("."), Exclude(()), file_limit=1000).select(9000)
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
    assert chosen(tmp_path) == ProjectFiles(("just",), 1000, ("large",), left_out=why)


def test_all_together_may_be_as_large_as_the_limit(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", size=500)
    files = ProjectFileFilter(tmp_path, Exclude(()), file_limit=1000)
    assert files.select(1000).size == 1000
    with pytest.raises(UserError, match="larger than"):
        files.select(999)


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
    files = ProjectFileFilter(tmp_path, exclude, ("out/model", "in.csv"), file_limit=1000)
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


# Files that a failed job names, that are here, and that were not uploaded.


WORKSPACE = "/scratch/me/mantik/project"


def missed(text: str, workdir: Path, *known: str) -> list[str]:
    def why(path: str) -> str | None:
        return None if path.endswith(".py") else "hidden"

    return missed_files(text, workdir, WORKSPACE, why, known=known)


@pytest.mark.parametrize(
    "text",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/big.csv'",
        "cat: data/big.csv: No such file or directory",
        "Error in file(file, 'rt') : cannot open the connection to \"data/big.csv\".",
        f"could not open {WORKSPACE}/data/big.csv!",
        "reading ./data/big.csv ...",
        "config=data/big.csv,x",
    ],
)
def test_a_file_is_found_however_a_program_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/big.csv").write_bytes(b"x" * 3072)
    [said] = missed(f"begin\n{text}\nend", tmp_path)
    assert said == "data/big.csv is here (3.0 KiB) but was not uploaded: hidden."


def test_what_is_there_or_nowhere_is_not_named(tmp_path: Path) -> None:
    for name in ("in.csv", "tool.py", "a b.csv"):
        (tmp_path / name).touch()
    (tmp_path / ".snakemake").mkdir()
    (tmp_path / ".snakemake/x").touch()
    text = f"in.csv tool.py nowhere.csv .snakemake/x . .. / {'x' * 5000} a\0b"
    assert missed(text, tmp_path, "in.csv") == []
    [said] = missed("No such file: 'a b.csv'", tmp_path)
    assert said.startswith("a b.csv is here (0 B)")


def test_files_outside_are_named_only_where_one_is_missing(tmp_path: Path) -> None:
    """Each traceback names files of Python that are here, too."""
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "far.csv").touch()
    assert missed(f"File {tmp_path}/far.csv, line 3", project) == []
    for name in (f"{tmp_path}/far.csv", "../far.csv"):
        [said] = missed(f"cat: {name}: No such file or directory", project)
        assert said == (
            f"{tmp_path}/far.csv is here (0 B) but was not uploaded: it is outside the working"
            " directory."
        )


def test_a_file_of_the_rule_has_another_path_at_the_site(tmp_path: Path) -> None:
    (tmp_path / "data.txt").touch()
    workdir = tmp_path / "run"
    workdir.mkdir()
    [said] = missed("../data.txt: No such file or directory", workdir, "../data.txt")
    assert "data.txt is a file of the rule" in said
    assert "use the path that the command or script gets" in said
    [said] = missed("../data.txt: No such file or directory", workdir)
    assert "was not uploaded" in said


def test_programs_and_scripts_of_the_scheduler_are_not_what_is_missing(tmp_path: Path) -> None:
    script = tmp_path / "spool/slurmd/job00021/slurm_script"
    script.parent.mkdir(parents=True)
    script.touch()
    project = tmp_path / "project"
    project.mkdir()
    text = f"{script}: line 7: tool: command not found\n/bin/sh: can't open file x"
    assert missed(text, project) == []


def test_the_last_ones_count_and_not_too_many(tmp_path: Path) -> None:
    for n in range(9):
        (tmp_path / f"{n}.csv").touch()
    said = missed("\n".join(f"{n}.csv" for n in range(9)), tmp_path)
    assert [line.split()[0] for line in said] == ["8.csv", "7.csv", "6.csv"]
