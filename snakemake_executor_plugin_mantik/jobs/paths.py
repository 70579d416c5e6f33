"""Every path of a try at a site comes out of this module, relative to the workspace.

The workspace mirrors the workflow's working directory; what is ours lies in `.mantik/` in it:

    .mantik/tries/<bucket>/<try>            claim: a file, or a directory when the try is revoked
    .mantik/tries/<bucket>/<try>.<code>     marker: how the try ended
    .mantik/tries/<bucket>/<try>.live       how much the job has logged, by its size
    .mantik/work/<bucket>/<try>/            log, archive of outputs, unpacking of a try, and in
                                            live/ what it has logged, while it runs
    .mantik/secrets/<try>                   secrets of a try, until it reads them; the directory is
                                            closed to others, whatever an upload does to the file
    .mantik/files/<checksum>/<name>         what a job needs and no directory of the workflow holds
    .mantik/outside/<absolute path>         files from outside of the working directory
    .mantik/conda/<content>-<machine>/      conda environments of rules
    .mantik/images/<source>-<machine>/      container images that lie nowhere in the workflow
    .mantik/shadow/<job>                    shadow directory of a job, while it runs
    .mantik/bundles/<bucket>/<id>.tar.gz    bundle: files on their way up
    .mantik/bundles/<bucket>/<id>.done      says that a bundle has been unpacked
    .mantik/place/                          whose the workspace is (`engine.leases`)
    .mantik/newer/<path>.n                  number of the newest content for a path, if it has one
    .mantik/known/<path>.k                  checksum of a large file, and what changes with it

One listing of a bucket of `tries` tells of all its tries: claimed, alive (a claim grows), revoked,
ended and with which exit code. A bucket whose tries are all done goes with two requests.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

OURS = ".mantik"
PLACE = f"{OURS}/place"
NEWER = f"{OURS}/newer"
KNOWN = f"{OURS}/known"
TRIES = f"{OURS}/tries"
WORK = f"{OURS}/work"
BUNDLES = f"{OURS}/bundles"
FILES_DIRECTORY = f"{OURS}/files"
SECRETS = f"{OURS}/secrets"
OUTSIDE = f"{OURS}/outside"
CONDA = f"{OURS}/conda"
IMAGES = f"{OURS}/images"
SHADOWS = f"{OURS}/shadow"

LIVE = ".live"

MAX_PATH_DEPTH = 200
"""Parts of a path that a job may make here: Python's own tools go down one call for each."""

_MARKER_NAME = re.compile(r"(?P<try>[0-9a-f-]{36})\.(?P<code>[0-9]{1,3})")


@dataclass(frozen=True)
class TryPaths:
    """The paths of one try.

    Attributes:
        bucket: number of the bucket that the journal put the try in.
        try_id: the try's UUID, in its 36-character form.
    """

    bucket: int
    try_id: str

    @property
    def tries(self) -> str:
        """The directory that is listed to watch the try."""
        return f"{TRIES}/{self.bucket}"

    @property
    def claim(self) -> str:
        """The claim file, or directory if the try is revoked."""
        return f"{self.tries}/{self.try_id}"

    def marker(self, exit_code: int) -> str:
        """The marker of a try that ended with `exit_code`."""
        return f"{self.claim}.{exit_code}"

    @property
    def live(self) -> str:
        """Its size tells how much there is in the pieces of what the job has logged."""
        return f"{self.claim}{LIVE}"

    @property
    def work(self) -> str:
        """The try's own directory."""
        return f"{WORK}/{self.bucket}/{self.try_id}"

    @property
    def log(self) -> str:
        """Standard output and standard error of the try, together."""
        return f"{self.work}/log"

    def piece(self, start: int) -> str:
        """What the job has logged from its byte `start` on (`jobs/live.sh.j2`)."""
        return f"{self.work}/live/piece.{start}"

    @property
    def archive(self) -> str:
        """A tar of the outputs that are too large for the marker and too small to go alone."""
        return f"{self.work}/outputs.tar"

    @property
    def secrets(self) -> str:
        """Shell assignments of the secrets; of mode 0600, removed by the job."""
        return f"{SECRETS}/{self.try_id}"


def bundle_path(bundle: str) -> str:
    """The path of the uploaded bundle `bundle`, a gzipped tar relative to the workspace.

    A bundle is named `<bucket>/<UUID>` and removed with its bucket, one of older versions `<UUID>`.
    """
    return f"{BUNDLES}/{bundle}.tar.gz"


def bundle_done_path(bundle: str) -> str:
    """The path of the empty file that says that `bundle` has been unpacked."""
    return f"{BUNDLES}/{bundle}.done"


def file_path(content: bytes, name: str) -> str:
    """The path of a file that is made here for a job; the same content has the same path."""
    return f"{FILES_DIRECTORY}/{hashlib.sha256(content).hexdigest()[:16]}/{name}"


def script_path(content: bytes, name: str) -> str:
    """The path of a rule's script: where Snakemake has it, which scripts can see and rely on."""
    return f".snakemake/scripts/{hashlib.sha256(content).hexdigest()[:16]}.{name}"


def outside_path(path: str) -> str:
    """The place of what lies at an absolute, normalised path outside of the working directory."""
    return f"{OUTSIDE}{path}"


def local_path(path: str, workdir: Path) -> Path:
    """Where a path of the workspace is here: in `workdir`, or where `outside_path` took it from."""
    beyond = path.removeprefix(f"{OUTSIDE}/")
    return workdir / path if beyond == path else Path("/", beyond)


def display_path(path: str) -> str:
    """A path of the workspace as the user knows it."""
    return path.removeprefix(OUTSIDE) if path.startswith(f"{OUTSIDE}/") else path


def parse_marker_name(name: str) -> tuple[str, int] | None:
    """The try and the exit code that a marker's name tells; None if `name` is no marker's."""
    match = _MARKER_NAME.fullmatch(name)
    return (match["try"], int(match["code"])) if match else None
