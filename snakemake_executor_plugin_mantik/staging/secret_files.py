"""Recognition of files that hold secrets, so that none is uploaded by mistake.

A site's administrators and every process of the user there can read the files of a job. So a file
from which a credential was read is never uploaded. Nor are copies of it uploaded as sources. The
sources also leave out, unless `Site: Include` names them, files that look like a secret by their
name, mode or content, and links that lead out of the working directory.
"""

import filecmp
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Final, Protocol

from snakemake_executor_plugin_mantik.common.errors import UserError, one_line
from snakemake_executor_plugin_mantik.common.state_directory import read_umask
from snakemake_executor_plugin_mantik.sites.lookup import credential_files

_MOST_NAMED: Final = 20

_LOOKED_AT: Final = 1 << 20
"""Bytes of a file that are searched for a private key."""

_PLAIN: Final = r"(\.(txt|json|ya?ml|toml|ini|cfg|conf|csv|xml|properties|env|dat|bak|old|orig))*"
_NAMES: Final = re.compile(
    r"\.?("
    r"id_(rsa|dsa|ecdsa|ed25519)(_sk)?"
    r"|(.*[_.-])?(credentials?|secrets?|passwords?|passwd|passphrase|token)" + _PLAIN + r""
    r"|(.*[_.-])?(api|access|private|secret|ssh)[_.-]?key" + _PLAIN + r""
    r"|(.*[_.-])?service[_.-]?account" + _PLAIN + r""
    r"|client_secret_.*\.json"
    r"|_?netrc|pgpass|htpasswd|kubeconfig|dockercfg|pypirc|npmrc|rclone\.conf|s3cfg|boto"
    r"|git-credentials|vault[_.-]?pass|krb5cc_.*"
    r"|(.*\.)?env(\.(local|prod|production|dev|development|test|staging))?"
    r"|.*\.(key|ppk|p12|pfx|jks|keystore|kdbx?|keytab|token|secret|password|passwd|netrc)"
    r")~?",
    re.IGNORECASE | re.DOTALL,
)
"""Names of files in which programs keep secrets; not those of code (`token.py`)."""

_DIRECTORIES: Final = frozenset({".ssh", ".gnupg", ".aws", ".kube", ".docker", ".azure", ".gcloud"})
"""Directories in which programs keep secrets, checked for targets of links."""

_KEYS: Final = re.compile(
    rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----[ \t]*(\r|\n|\\[nr])"  # PEM, OpenSSH, PGP
    rb"|---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----"
    rb"|^PuTTY-User-Key-File-\d"
    rb"|^SSH PRIVATE KEY FILE FORMAT"
    rb"|\bAGE-SECRET-KEY-1[0-9A-Z]{20}"
    rb"|^untrusted comment: .*secret key",
    re.MULTILINE,
)
"""Patterns of private keys, also as text in JSON or YAML."""

_Identity = tuple[int, int]
"""A file independent of links: device and inode."""


@dataclass(frozen=True)
class CredentialFiles:
    """The files from which credentials are read, including links and hard links to them.

    `variables` and `paths` have the environment variable that names each; `paths` resolves links.
    """

    variables: Mapping[_Identity, str] = field(default_factory=dict)
    paths: Mapping[Path, str] = field(default_factory=dict)
    sizes: Mapping[Path, int] = field(default_factory=dict)

    @classmethod
    def named_by(cls, environ: Mapping[str, str]) -> "CredentialFiles":
        """Find the existing files that an environment's variables name."""
        variables: dict[_Identity, str] = {}
        paths: dict[Path, str] = {}
        sizes: dict[Path, int] = {}
        for variable, path in credential_files(environ).items():
            try:
                status, at = path.stat(), path.resolve()
                variables[_identity(status)] = variable
                paths[at], sizes[at] = variable, status.st_size
            except OSError:
                continue  # reported where the credential is read
        return cls(variables, paths, sizes)

    def variable_of(self, status: os.stat_result) -> str:
        """Return the variable that names a file as a credential's; empty if none does."""
        return self.variables.get(_identity(status), "")

    def copied_in(self, path: str, status: os.stat_result) -> str:
        """Return the variable whose file `path` is a copy of; empty if there is none.

        Only files of the same size are compared. An empty file is not a copy of anything.
        """
        for original, size in self.sizes.items():
            if size != status.st_size or not size:
                continue
            with suppress(OSError):
                if filecmp.cmp(original, path, shallow=False):
                    return self.paths[original]
        return ""

    def refuse(self, path: object, status: os.stat_result) -> None:
        """Refuse a credential's file.

        Raises:
            UserError: the file is one.
        """
        if variable := self.variable_of(status):
            raise _refusal(path, variable)

    def below(self, path: str) -> dict[Path, str]:
        """Return the credential files that are `path` or below it, with their variables."""
        if not self.variables:
            return {}
        try:
            if variable := self.variable_of(os.stat(path)):
                return {Path(path): variable}
            root = Path(path).resolve()
        except (OSError, RuntimeError):
            return {}
        return {at: variable for at, variable in self.paths.items() if root in at.parents}


def _refusal(path: object, variable: str) -> UserError:
    return UserError(
        f"the file holds the credential of {variable}, which is never uploaded to a site",
        where=str(path),
        do="Move it out of the input directory, or remove it from the inputs",
    )


class Matching(Protocol):
    """Matches paths, like `config.exclude.Exclude`."""

    def matches(self, path: str, *, is_dir: bool = False) -> bool:
        """Check whether `path`, relative to the directory, matches."""


@dataclass(frozen=True)
class _Always:
    says: bool

    def matches(self, path: str, *, is_dir: bool = False) -> bool:
        del path, is_dir
        return self.says


NOTHING: Final[Matching] = _Always(False)

EVERYTHING: Final[Matching] = _Always(True)


class Withheld:
    """Files below a directory that are not uploaded; `str()` gives a line that reports them."""

    def __init__(self, directory: Path, include: Matching) -> None:
        """Withhold secrets of `directory` that `include` does not match, and credentials always."""
        self._directory = directory
        self._root = os.path.realpath(directory)
        self._include = include
        self._credentials = CredentialFiles.named_by(os.environ)
        self._secret: dict[str, str] = {}
        self._never: dict[str, str] = {}

    def withholds(self, path: str, status: os.stat_result) -> bool:
        """Check whether a file must not be uploaded, and record it if so.

        `path` is relative to the directory; `status` is that of a link's target.
        """
        local = os.path.join(self._directory, path)
        if variable := self._credentials.variable_of(status):
            self._never[path] = variable
            return True
        if variable := self._credentials.copied_in(local, status):
            self._never[path] = f"a copy of {variable}"
            return True
        if self._include.matches(path):
            return False
        why = _suspicion(path, local, status, self._root)
        if why:
            self._secret[path] = why
        return bool(why)

    def why(self, path: str) -> str:
        """Return why a file is withheld, in a few words; empty if it is not."""
        if path in self._never:
            return f"it holds a credential ({self._never[path]})"
        why = self._secret.get(path, "")
        return f"it may hold a secret ({why})" if why else ""

    def __str__(self) -> str:
        parts = []
        if self._secret:
            parts.append(
                f"not uploaded, since they may hold secrets: {_named(self._secret)}; to upload one"
                " anyway, add it to Site: Include in the backend config"
            )
        if self._never:
            parts.append(f"never uploaded, since they hold credentials: {_named(self._never)}")
        return "; ".join(parts)


def _named(files: Mapping[str, str]) -> str:
    named = [one_line(f"{path} ({why})") for path, why in files.items()]
    more = len(named) - _MOST_NAMED
    return ", ".join(named[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _suspicion(path: str, local: str, status: os.stat_result, root: str) -> str:
    """Return why a file may hold a secret, in a few words; empty if it does not look so."""
    target = PurePath(os.path.realpath(local))
    if not target.is_relative_to(root):
        return "a link out of the directory"
    if _DIRECTORIES & set(target.relative_to(root).parts):
        return "a link into a directory of secrets"
    if any(_NAMES.fullmatch(name) for name in (PurePath(path).name, target.name)):
        return "named like a secret"
    # If the umask closes every new file, the mode proves nothing.
    if not status.st_mode & 0o077 and read_umask() & 0o077 != 0o077:
        return f"closed to others, mode {stat.S_IMODE(status.st_mode):04o}"
    return "a private key" if _holds_key(local) else ""


def _holds_key(local: str) -> bool:
    try:
        with open(local, "rb") as file:
            content = file.read(_LOOKED_AT)
    except OSError:
        return False  # reported when it is uploaded
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):  # UTF-16, as some editors write
        content = content[2:].replace(b"\0", b"")
    return _KEYS.search(content) is not None


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino
