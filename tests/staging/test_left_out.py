"""Files that a failed job names, that are here, and that were not uploaded."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.staging.sources import missed_files

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
