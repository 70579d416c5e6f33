"""Selection of the sources: files of the working directory to upload besides a job's inputs.

A rule names its inputs, but not the scripts that its command calls, nor their imports. So all small
files of the working directory are uploaded as sources, once per site and content, except: hidden
files and directories, files in the backend config's Exclude, files that rules make or read (they
are uploaded as inputs), virtual environments and caches of Python, `node_modules`, MLflow's own
files, logs, files above the size limit, and files that may hold a secret (`staging.secret_files`).
"""

import os
import stat
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.staging.secret_files import NOTHING, Matching, Withheld

_GENERATED = frozenset({"__pycache__", "node_modules", "mlruns", "mlartifacts"})
_MLFLOW = "mlflow.db"
"""MLflow's own store, which changes with each run; beside it are SQLite's -wal and -shm."""


_LOG = (".log", "nohup.out")
"""Endings of the names of logs. `snakemake > run.log` and its like grow during the upload, and
differ in each run."""


MIB = 1 << 20


@dataclass(frozen=True)
class Sources:
    """The selected sources, `paths` in order and relative to the working directory.

    Attributes:
        size: bytes of all of them together.
        too_large: paths left out because of the limit for one file.
        withheld: one line about files withheld as secrets, with advice; may be empty.
    """

    paths: tuple[str, ...]
    size: int
    too_large: tuple[str, ...]
    withheld: str = ""


def select_sources(
    workdir: Path,
    exclude: Matching,
    *,
    products: Container[str],
    file_limit: int,
    total_limit: int,
    include: Matching = NOTHING,
) -> Sources:
    """Select the sources below `workdir`, the workflow's working directory.

    `exclude` and `include` are the backend config's Exclude and `Site: Include`; the latter matches
    files that are uploaded although they may hold a secret. `products` are files and directories
    that rules of the workflow make or read. A file above `file_limit` bytes is left out.

    Raises:
        UserError: the sources are larger than `total_limit` bytes together.
    """
    paths: list[str] = []
    too_large: list[str] = []
    total = 0
    sizes: Counter[str] = Counter()
    withheld = Withheld(workdir, include)
    for path, status in _walk(workdir, exclude, products):
        size = status.st_size
        if size > file_limit:
            too_large.append(path)
        elif not withheld.withholds(path, status):
            paths.append(path)
            total += size
            sizes[path.partition("/")[0]] += size
        if total > total_limit:
            largest = ", ".join(f"{n} ({s / MIB:.1f} MiB)" for n, s in sizes.most_common(3))
            raise UserError(
                "the sources in the working directory are larger than"
                f" {total_limit / MIB:.1f} MiB; the largest parts so far are {largest}",
                where=str(workdir),
                do="Add files that the jobs do not need to Exclude in the backend config, name data"
                " as inputs of the rules, or raise Site: SourcesLimit",
            )
    return Sources(tuple(paths), total, tuple(too_large), str(withheld))


def list_candidates(
    workdir: Path, exclude: Matching, products: Container[str], include: Matching = NOTHING
) -> Iterator[tuple[str, int]]:
    """Yield all files that are sources whatever their size, with their sizes in bytes.

    In a fixed order. Arguments as for `select_sources`; `products` is also
    checked for directories, which are then left out with their files.
    """
    withheld = Withheld(workdir, include)
    for path, status in _walk(workdir, exclude, products):
        if not withheld.withholds(path, status):
            yield path, status.st_size


def _walk(
    workdir: Path, exclude: Matching, products: Container[str]
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the candidates, secrets included; the status is that of links' targets."""
    own = _own_output()
    for at, directories, files in os.walk(workdir):
        below = Path(at).relative_to(workdir).as_posix()
        prefix = "" if below == "." else f"{below}/"
        directories[:] = sorted(
            name
            for name in directories
            if not name.startswith(".")
            and name not in _GENERATED
            and f"{prefix}{name}" not in products
            and not os.path.exists(os.path.join(at, name, "pyvenv.cfg"))
            and not exclude.matches(f"{prefix}{name}", is_dir=True)
        )
        for name in sorted(files):
            path = f"{prefix}{name}"
            local = os.path.join(at, name)
            if name.startswith((".", _MLFLOW)) or name.endswith(_LOG) or path in products:
                continue
            if exclude.matches(path) or (status := _status(local)) is None:
                continue
            if (status.st_dev, status.st_ino) not in own:
                yield path, status


def _status(path: str) -> os.stat_result | None:
    """Return a file's status; None if it is not a regular file, or is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _own_output() -> set[tuple[int, int]]:
    """Return the files, as device and inode, that this process writes its output to."""
    found = set()
    for descriptor in (1, 2):
        with suppress(OSError):
            status = os.fstat(descriptor)
            found.add((status.st_dev, status.st_ino))
    return found
