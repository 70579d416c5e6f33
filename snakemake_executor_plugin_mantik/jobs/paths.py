"""Build every path of an attempt at a site, relative to the workspace.

The workspace mirrors the workflow's working directory; the executor's own files are in `.mantik/`:

    .mantik/attempts/<bucket>/<id>          claim: a file, or a directory if it is revoked
    .mantik/attempts/<bucket>/<id>.<code>   marker: how the attempt ended
    .mantik/attempts/<bucket>/<id>.live     its size is the amount that the job has logged
    .mantik/work/<bucket>/<id>/             log, archive of outputs, unpacking of an attempt, what
                                            its script reads as files, and in live/ what it has
                                            logged, while it runs
    .mantik/secrets/<id>                    secrets of an attempt, until it reads them; only the
                                            user may enter the directory, whatever their modes
    .mantik/files/<checksum>/<name>         generated files that a job needs
    .mantik/up/<n>                          link to the directory n above; files from as far above
                                            the working directory have paths below it
    .mantik/outside/<absolute path>         other files from outside the working directory
    .mantik/conda/<content>-<machine>/      conda environments of rules
    .mantik/python/<path>/<content>-<machine>/  virtual environments that jobs made
    .mantik/images/<source>-<machine>/      container images from outside the workflow
    .mantik/shadow/<job>                    shadow directory of a job, while it runs
    .mantik/bundles/<bucket>/<id>.tar.gz    bundle of uploaded files
    .mantik/bundles/<bucket>/<id>.done      exists when the bundle has been unpacked
    .mantik/bundles/kept/<id>.tar.gz        bundle that stays until a job unpacks it
    .mantik/pools/<pool>/                   jobs of a pool and its allocations (`bash/agent.sh`)
    .mantik/lib-<checksum>.sh               the library of bash that jobs' scripts use; it stays
    .mantik/place/                          who owns the workspace (`engine.leases`), and what a
                                            lost journal knew of it (`engine.catch_up`)
    .mantik/newer/<path>.n                  number of the newest content for a path, if it has one
    .mantik/known/<path>.k                  checksum of a large file, and what changes with it

The workspace is the innermost of several directories, so that a script finds `../data` above it:

    up3/up2/up1/workdir                     below the directory that the site's config names

One listing of a bucket of `attempts` shows the state of all its attempts: claimed, alive (the claim
grows), revoked, or ended with an exit code. A bucket whose attempts are all done is removed with
two or three requests.
"""

import hashlib
import os
import posixpath
import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

WORKSPACE = "/WORKSPACE"
"""Placeholder for the path of a workspace that is not known yet."""
OURS = ".mantik"
PLACE = f"{OURS}/place"
ATTEMPTS = f"{OURS}/attempts"
WORK = f"{OURS}/work"
BUNDLES = f"{OURS}/bundles"
KEPT = "kept/"
"""Prefix of the names of bundles that no bucket holds: they stay until a job unpacks them."""
FILES_DIRECTORY = f"{OURS}/files"
SECRETS = f"{OURS}/secrets"
OUTSIDE = f"{OURS}/outside"
UP = f"{OURS}/up"
UPS = (1, 2, 3)
"""How far above the working directory files keep their relative paths at a site."""
CONDA = f"{OURS}/conda"
IMAGES = f"{OURS}/images"
PYTHONS = f"{OURS}/python"
SHADOWS = f"{OURS}/shadow"

LIVE = ".live"
IMPORTED = "imported"
"""The directory, in a bundle's, of files that the site's server fetches from another one."""

MAX_PATH_DEPTH = 200
"""Maximum depth of a path that a job makes: Python's own tools recurse once per directory."""

ROOT = f"{UP}/{len(UPS) + 1}"
"""The directory that the site's config names."""

_WAY = (*(f"up{up}" for up in reversed(UPS)), "workdir")
"""The directories that lead to the workspace, from the one that the site's config names."""
BELOW_TOP = posixpath.join("/", *_WAY[1:])
"""The way to the workspace from `workspace_top`."""
_ABOVE = re.compile(rf"{re.escape(UP)}/(?P<up>[0-9])(?:/(?P<rest>.*))?", re.DOTALL)

_ATTEMPT_ID = re.compile(r"[0-9a-f-]{36}")
_MARKER_NAME = re.compile(r"(?P<attempt>[0-9a-f-]{36})\.(?P<code>[0-9]{1,3})")


@dataclass(frozen=True)
class AttemptPaths:
    """The paths of one attempt.

    Attributes:
        bucket: number of the bucket that the journal put the attempt in.
        attempt_id: the attempt's UUID, in its 36-character form.
    """

    bucket: int
    attempt_id: str

    @property
    def attempts(self) -> str:
        """The directory to list in order to watch the attempt."""
        return f"{ATTEMPTS}/{self.bucket}"

    @property
    def claim(self) -> str:
        """The claim: a file, or a directory if the attempt is revoked."""
        return f"{self.attempts}/{self.attempt_id}"

    def marker(self, exit_code: int) -> str:
        return f"{self.claim}.{exit_code}"

    @property
    def live(self) -> str:
        """A file whose size is the total size of the pieces that the job has logged."""
        return f"{self.claim}{LIVE}"

    @property
    def work(self) -> str:
        return f"{WORK}/{self.bucket}/{self.attempt_id}"

    @property
    def log(self) -> str:
        """Standard output and standard error of the attempt, together."""
        return f"{self.work}/log"

    @property
    def asked(self) -> str:
        """The directory of the commands that run beside the job (`heartbeat.sh`)."""
        return f"{self.work}/exec"

    def piece(self, start: int) -> str:
        """Return the path of the piece of logged data that begins at `start` (`live.sh`)."""
        return f"{self.work}/live/piece.{start}"

    @property
    def archive(self) -> str:
        """A tar of the outputs that are too large for the marker and too small to fetch alone."""
        return f"{self.work}/outputs.tar"

    def lists(self, checksum: str) -> str:
        """Return how the paths of the files beside the script begin; they hold `checksum`."""
        return f"{self.work}/lists.{checksum}"

    @property
    def secrets(self) -> str:
        """Shell assignments of the secrets; of mode 0600, removed by the job."""
        return f"{SECRETS}/{self.attempt_id}"


def number_path(path: str) -> str:
    """Return the path of the file with the number of the newest content for a path."""
    return f"{OURS}/newer/{path}.n"


def bundle_path(bundle: str) -> str:
    """Return the path of an uploaded bundle, a gzipped tar with paths relative to the workspace.

    A bundle is named `<bucket>/<UUID>` and removed with its bucket, or `kept/<UUID>` and removed
    when it has been unpacked.
    """
    return f"{BUNDLES}/{bundle}.tar.gz"


def imported_path(bundle: str, name: str) -> str:
    """Return the path of a file of a bundle that the site's server fetches from another one."""
    return f"{bundle_path(bundle)}/{IMPORTED}/{name}"


def bundle_done_path(bundle: str) -> str:
    """Return the path of the empty file that marks `bundle` as unpacked."""
    return f"{BUNDLES}/{bundle}.done"


def file_path(content: bytes, name: str) -> str:
    """Return the path of a file generated for a job; the same content has the same path."""
    return f"{FILES_DIRECTORY}/{hashlib.sha256(content).hexdigest()[:16]}/{name}"


def script_path(content: bytes, name: str) -> str:
    """Return the path of a rule's script: Snakemake's own, because scripts may rely on it."""
    return f".snakemake/scripts/{hashlib.sha256(content).hexdigest()[:16]}.{name}"


def at_or_above(path: str) -> list[str]:
    """Return a path and those of the directories above it, the nearest first, `.` or `/` last."""
    return [path, *map(str, PurePosixPath(path).parents)]


def is_at(path: str, directory: str) -> bool:
    """Return whether a path is `directory`, or below it."""
    return f"{path}/".startswith(f"{directory}/")


def nearest(path: str, known: Container[str]) -> str | None:
    """Return the path itself or the nearest directory above it that is `known`, if any is."""
    if path in known:
        return path
    return next((each for each in at_or_above(path) if each in known), None)


def workspace_below(directory: str) -> str:
    """Return the path of the workspace in the directory that a site's config names for it."""
    return posixpath.join(directory, *_WAY)


def workspace_root(workspace: str) -> str:
    """Return the directory that a site's config names; undo `workspace_below`."""
    return workspace.removesuffix(posixpath.join("/", *_WAY))


def workspace_top(workspace: str) -> str:
    """Return the directory that holds the workspace and all that lies above it for its jobs."""
    return workspace.removesuffix(BELOW_TOP)


def way_down(up: int) -> str:
    """Return the name by which the way to the workspace goes on in the directory `up` above it."""
    return _WAY[-up]


def path_at_site(workspace: str, path: str) -> str:
    """Join the path of a workspace at its site, and a path in it, without its links upwards."""
    above = _ABOVE.fullmatch(path)
    if above is None:
        return f"{workspace}/{path}"
    return posixpath.normpath(f"{workspace}/{_climb(above)}")


def outside_path(path: str, workdir: str) -> str:
    """Map an absolute, normalised path outside the working directory to one in the workspace."""
    above = workdir
    for up in UPS:
        above = posixpath.dirname(above)
        if path == above:
            break  # it would contain the working directory
        if path.startswith(f"{above.rstrip('/')}/"):
            return f"{UP}/{up}/{path[len(above.rstrip('/')) + 1 :]}"
    return f"{OUTSIDE}{path}"


def is_outside(path: str) -> bool:
    """Return whether a path of the workspace is one of `outside_path`."""
    return path.startswith((f"{OUTSIDE}/", f"{UP}/"))


def local_path(path: str, workdir: Path) -> Path:
    """Map a path of the workspace to one on this machine; undo `outside_path`."""
    if (above := _ABOVE.fullmatch(path)) is not None:
        return Path(os.path.normpath(os.path.join(os.path.realpath(workdir), _climb(above))))
    return workdir / display_path(path)


def display_path(path: str) -> str:
    """Return a path of the workspace as the user knows it."""
    if (above := _ABOVE.fullmatch(path)) is not None:
        return _climb(above)
    return path.removeprefix(OUTSIDE) if path.startswith(f"{OUTSIDE}/") else path


def _climb(above: re.Match[str]) -> str:
    return posixpath.join("../" * int(above["up"]), above["rest"] or "").rstrip("/")


def is_attempt_id(name: str) -> bool:
    """Return whether a name in a bucket is that of a claim, or of a directory that revokes one."""
    return _ATTEMPT_ID.fullmatch(name) is not None


def parse_marker_name(name: str) -> tuple[str, int] | None:
    """Return the attempt's UUID and the exit code in a marker's name; None for other names."""
    match = _MARKER_NAME.fullmatch(name)
    return (match["attempt"], int(match["code"])) if match else None
