"""Copy a project for a run: a snapshot of a folder, or one version of a git repository.

Copies share blocks with the original where the file system supports that.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from ..common.errors import Mistake, UserError
from ..config.environment import environment_uploads
from ..config.exclude import Exclude, Include
from ..config.model import BackendConfig
from ..mlproject.single_rule import RESULTS
from ..staging.project_files import list_candidates
from ..staging.secret_files import EVERYTHING, Matching
from ..tracking.run import git_tags, without_user
from . import git
from .directories import RunDirectory, runs_home

_INPUTS: Final = "mantik-inputs"
"""The folder of a snapshot for files that parameters name outside of the project or hidden."""

_MLPROJECT: Final = "mlproject"


@dataclass(frozen=True)
class TakenProject:
    """A project in a run directory.

    Attributes:
        uri: its origin: an absolute path, or a URL without password; `#sub` names a folder in it.
        folder: the snapshot.
        origin: the folder that was copied; None if the project is from git.
        tags: MLflow tags that describe the version.
    """

    uri: str
    folder: Path
    origin: Path | None = None
    version: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


def take_project(
    uri: str, version: str, config: BackendConfig, directory: RunDirectory
) -> TakenProject:
    """Copy a project into a run directory, without writing to its origin.

    Args:
        uri: a folder, its MLproject file or a git URL, each with `#sub` for a folder in it.
        version: a branch, tag or commit; empty: the folder as it is, or the repository's HEAD.
        config: names the files of a folder to leave out (`Exclude`); a git version is complete.
        directory: the run directory.

    Raises:
        UserError: the project does not exist, cannot be copied, or has links that lead out of it.
    """
    where, sub = _split(uri)
    folder = None if git.is_remote(where) else _folder(where)
    if folder is None:
        return _from_git(where, version, sub, directory, where)
    if version or (git.is_repository(folder) and not (folder / ".git").exists()):
        top, below = _top(folder)
        inside = os.path.normpath(os.path.join(below, sub))
        return _from_git(str(top), version, "" if inside == "." else inside, directory, where)
    origin = _inside(folder, sub, uri)
    target = directory.project(origin.resolve().name)
    with _file_errors(origin):
        include = Include(config.site.include)
        # Results of the folder's runs, and run directories, are never copied.
        leave = {RESULTS, os.path.relpath(runs_home().resolve(), origin.resolve())}
        _copy_sources(origin, target, Exclude(config.exclude), leave, include=include)
        for path in _named(origin, config):
            if not (target / path).exists():
                _copy_file(origin / path, target / path)
    return TakenProject(str(origin), target, origin, tags=_versioned(origin))


def retake_project(old: Path, directory: RunDirectory) -> Path:
    """Copy the snapshot of another run, without that run's results.

    Raises:
        UserError: the snapshot cannot be copied.
    """
    target = directory.project(old.name)
    with _file_errors(old):
        _copy_sources(old, target, Exclude(()), {RESULTS}, include=EVERYTHING)
    return target


def project_values(
    taken: TakenProject, parameters: Mapping[str, str], paths: set[str]
) -> dict[str, str]:
    """Return the parameters as the workflow in the snapshot needs them.

    The value of a parameter in `paths` (those of type path) is first looked up in the current
    directory, as `mlflow run` does, then in the project. A file that is not in the snapshot is
    copied into it.

    Raises:
        UserError: a file cannot be copied.
    """
    return {
        name: _value(taken, name, value) if name in paths else value
        for name, value in parameters.items()
    }


def missing_values(
    taken: TakenProject, values: Mapping[str, str], paths: set[str]
) -> dict[str, Mistake]:
    """Return a mistake by name for each parameter in `paths` that names nothing in the snapshot.

    Absolute paths, and values with `:` or `{`, are not checked.
    """
    return {
        name: Mistake(
            f"-P {name}", "", f"there is no file {value!r}, neither here nor in the project"
        )
        for name, value in values.items()
        if name in paths and value and not set(value) & set("{:") and not os.path.isabs(value)
        if not (taken.folder / value).exists()
    }


def _value(taken: TakenProject, name: str, value: str) -> str:
    given = value.removeprefix("file://")
    if not given or "://" in given or "{" in given:
        return value
    here = Path(given).expanduser().absolute()
    if not here.exists():
        return value  # in the project, or a mistake that is reported with all others
    real, origin = here.resolve(), taken.origin and taken.origin.resolve()
    if real.is_relative_to(taken.folder.resolve()):
        return str(real.relative_to(taken.folder.resolve()))
    path = os.path.join(_INPUTS, name, here.name)
    if origin is not None and real != origin and real.is_relative_to(origin):
        inside = real.relative_to(origin)
        path = path if any(part.startswith(".") for part in inside.parts) else str(inside)
    with _file_errors(here):
        _copy_any(real, taken.folder / path)
    return path


def _split(uri: str) -> tuple[str, str]:
    """Split a URI into the project's location and the folder in it."""
    if os.path.exists(uri):
        return uri, ""
    where, _, sub = uri.partition("#")
    return where, sub.strip("/")


def _folder(where: str) -> Path | None:
    path = Path(unquote(where.removeprefix("file://")) if where.startswith("file://") else where)
    path = path.expanduser().absolute()
    if where.endswith(".zip"):
        raise UserError(
            "projects in zip files are not supported",
            where=where,
            do="Unpack it and pass the folder",
        )
    if path.is_file() and path.name.lower() == _MLPROJECT:
        path = path.parent
    if not path.is_dir():
        raise UserError(
            "there is no such folder", where=where, do="Pass a folder or the URL of a repository"
        )
    return path


def _inside(folder: Path, sub: str, uri: str) -> Path:
    found = folder / sub
    if os.path.normpath(sub).split("/")[0] == ".." or os.path.isabs(sub) or not found.is_dir():
        raise UserError(
            f"there is no folder {sub!r} in it", where=without_user(uri),
            do="Use a folder of this version after the #",
        )  # fmt: skip
    if not found.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"its folder {sub!r} is a link that leads out of it", where=without_user(uri),
            do="Pass the folder that it links to",
        )  # fmt: skip
    return found


def _top(folder: Path) -> tuple[Path, str]:
    """Return the repository that a folder belongs to, and the folder's path in it."""
    if git.is_repository(folder):
        return folder, ""
    ended = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--show-prefix", "--show-toplevel"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if ended.returncode != 0:
        raise UserError(
            "the folder is in no git repository, so it has no versions", where=str(folder),
            do="Leave the version out",
        )  # fmt: skip
    prefix, top = ended.stdout.split("\n")[:2]
    return Path(top), prefix.rstrip("/")


def _from_git(
    url: str, version: str, sub: str, directory: RunDirectory, shown: str
) -> TakenProject:
    clone = directory.path / "clone"
    commit = git.fetch_project(url, version, clone)
    name = Path(sub).name or url.rstrip("/").removesuffix("/.git").removesuffix(".git")
    found = _inside(clone, sub, shown) if sub else clone
    tags = {**_versioned(found), "mlflow.source.git.commit": commit}
    if branch := git.branch_name(clone, version):
        tags["mlflow.source.git.branch"] = branch
    target = directory.project(name.replace(":", "/").rpartition("/")[2])
    with _file_errors(clone):
        shutil.rmtree(clone / ".git", ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        found.rename(target)
        shutil.rmtree(clone, ignore_errors=True)
    if outside := list(_leading_out(target, directory.path)):
        raise UserError(
            f"it has symbolic links to files of this machine: {', '.join(outside[:5])}",
            where=without_user(shown),
            do="Find out why before you submit it: these files would be uploaded to the site as"
            " the project's",
        )
    uri = without_user(url if git.is_remote(url) else str(Path(url).absolute()))
    return TakenProject(f"{uri}#{sub}" if sub else uri, target, None, version, tags)


def _leading_out(project: Path, run: Path) -> Iterator[str]:
    """Yield the symbolic links of a repository that lead to files of this machine outside of it.

    Others may have written the repository. Broken links are harmless, since they are not uploaded:
    they may mean a path at a site. Those into the run directory are yielded, too: their targets
    may appear later.
    """
    inside = os.path.realpath(project)
    for at, folders, files in os.walk(project):
        for path in (os.path.join(at, name) for name in (*folders, *files)):
            real = os.path.realpath(path)
            if not os.path.islink(path) or f"{real}/".startswith(f"{inside}/"):
                continue
            if os.path.exists(real) or f"{real}/".startswith(f"{os.path.realpath(run)}/"):
                yield f"{os.path.relpath(path, project)} -> {os.readlink(path)}"


def _versioned(folder: Path) -> dict[str, str]:
    """Return the git tags of a folder now: `git_tags` caches, and this process may submit often."""
    return dict(git_tags.__wrapped__(folder))


def _named(origin: Path, config: BackendConfig) -> Iterator[str]:
    """Yield files to copy even if excluded: the MLproject file, and files the config names."""
    yield from (p.name for p in origin.iterdir() if p.name.lower() == _MLPROJECT and p.is_file())
    paths = [config.site.ca_file]
    for environment in config.all_environments.values():
        files = environment_uploads(environment, origin)
        paths += [os.path.relpath(local, origin) for local, _ in files]
    for path in paths:
        if path and not os.path.isabs(path) and (origin / path).is_file():
            yield str(path)


@contextmanager
def _file_errors(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the project cannot be copied ({error})",
            where=str(where),
            do="Check that it is readable and that there is space for a copy",
        ) from None


_FICLONE: Final = 0x40049409
"""The Linux ioctl that makes a file share another one's blocks (Btrfs, XFS, bcachefs)."""


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file, or the target of a link, with times and mode; create its directory."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not _clone(source, target):
        shutil.copyfile(source, target)
    shutil.copystat(source, target)


def _clone(source: Path, target: Path) -> bool:
    if sys.platform != "linux":
        return False
    with source.open("rb") as there, target.open("wb") as here:
        try:
            fcntl.ioctl(here, _FICLONE, there.fileno())
        except OSError:  # another file system, or one without shared blocks
            return False
    return True


def _copy_sources(
    source: Path, target: Path, exclude: Exclude, leave: Container[str], *, include: Matching
) -> None:
    """Copy the files of a project that may be uploaded for a job, whatever their size.

    Leaves out the paths in `leave`. Copies files that match `include` although they seem to hold a
    secret.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path, _ in list_candidates(source, exclude, leave, include):
        _copy_file(source / path, target / path)


def _copy_any(source: Path, target: Path) -> None:
    """Copy a file, or a directory with all its files, hidden ones included."""
    if not source.is_dir():
        _copy_file(source, target)
        return
    for at, _, files in os.walk(source):
        below = target / Path(at).relative_to(source)
        below.mkdir(parents=True, exist_ok=True)
        for name in files:
            if os.path.isfile(os.path.join(at, name)):
                _copy_file(Path(at, name), below / name)
