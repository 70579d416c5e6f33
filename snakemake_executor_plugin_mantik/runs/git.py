"""Fetch one version of a git repository, with the installed `git`.

Credentials come from git itself (its helpers, an SSH agent), never from a prompt. A password in a
URL appears neither in messages, nor in the list of processes, nor in the cloned repository.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote

from ..common.errors import UserError, find_alike
from ..tracking.run import without_user

_FETCH_S: Final = 1800.0
"""The most seconds that one git command may take."""

_REMOTE: Final = re.compile(r"(?:[a-z][a-z0-9+.-]*://|[^/@\s]+@[^/:\s]+:)")
_NO_ACCESS: Final = re.compile(
    # Of git itself, OpenSSH, and the servers of GitHub and GitLab.
    r"Authentication failed|could not read (?:Username|Password)|Permission denied"
    r"|Repository not found|could not be found|returned error: 40[134]|Access denied"
)

_WITH_PASSWORD: Final = re.compile(
    r"(?P<scheme>https?://)(?P<user>[^/:@]*):(?P<password>[^/]*)@(?P<host>[^/]*)"
)
_USER, _PASSWORD = "SMK_MANTIK_GIT_USER", "SMK_MANTIK_GIT_PASSWORD"
_HELPER: Final = (
    '!f() { test "$1" != get || '
    f'printf "username=%s\\npassword=%s\\n" "${_USER}" "${_PASSWORD}"; }}; f'
)
"""A credential helper (gitcredentials(7)) for git's shell; it prints values of the environment."""


@dataclass(frozen=True)
class _Remote:
    """A repository's address for git.

    Attributes:
        url: without password.
        shown: for messages, without user and password.
        environment: variables that pass user and password to git, if the URL has a password.
    """

    url: str
    shown: str
    environment: Mapping[str, str] = field(repr=False, default_factory=dict)


def _remote(url: str) -> _Remote:
    """Parse a repository's URL; git uses its user and password for that server alone."""
    shown = without_user(url)
    match = _WITH_PASSWORD.match(url)
    if match is None:
        return _Remote(url, shown)
    server = match["scheme"] + match["host"]
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    # The first helper is empty: it disables all others, which could store the password.
    config = {
        f"GIT_CONFIG_{what}_{first + n}": value
        for n, helper in enumerate(("", _HELPER))
        for what, value in (("KEY", f"credential.{server}.helper"), ("VALUE", helper))
    }
    secret = {_USER: unquote(match["user"]), _PASSWORD: unquote(match["password"])}
    return _Remote(shown, shown, {**secret, **config, "GIT_CONFIG_COUNT": str(first + 2)})


def is_remote(uri: str) -> bool:
    """Return whether a URI names no local folder: a URL but for file://, or `user@host:path`."""
    return bool(_REMOTE.match(uri)) and not uri.startswith("file://")


def is_repository(folder: Path) -> bool:
    """Return whether a folder is the top of a repository, or a bare repository."""
    return (folder / ".git").exists() or (
        (folder / "HEAD").is_file() and (folder / "objects").is_dir()
    )


def fetch_project(url: str, version: str, into: Path) -> str:
    """Fetch one version of a repository, with its submodules, and return its commit.

    Args:
        url: the repository.
        version: a branch, tag or commit; empty: the repository's HEAD.
        into: a directory that does not exist yet.

    Raises:
        UserError: git is not installed, or the repository or the version cannot be fetched.
    """
    remote = _remote(url)
    if url.startswith("-") or version.startswith("-"):
        raise UserError(
            "neither an address nor a version may begin with -",
            where=f"git {remote.shown} {version}".rstrip(), do="Correct the one that does",
        )  # fmt: skip
    if not _shallow(remote, version, into):
        shutil.rmtree(into, ignore_errors=True)
        _git(remote, "clone", "--quiet", "--no-checkout", "--", remote.url, str(into))
        commit = _commit(into, version)
        if not commit:
            raise UserError(
                f"there is no branch, tag or commit {version!r}{_close(into, version)}",
                where=remote.shown,
                do="Correct the version",
            )
        _git(remote, "-C", str(into), "checkout", "--quiet", "--detach", commit)
    if (into / ".gitmodules").exists():
        _git(remote, "-C", str(into), "submodule", "--quiet", "update", "--init", "--recursive")
    return _git(remote, "-C", str(into), "rev-parse", "HEAD").strip()


def branch_name(repository: Path, version: str) -> str:
    """Return the branch that was fetched; empty if the version is no branch."""
    ended = _run(["-C", str(repository), "symbolic-ref", "--short", "--quiet", "HEAD"])
    if ended.returncode == 0:
        return ended.stdout.strip()
    name = f"refs/remotes/origin/{version}"
    known = _run(["-C", str(repository), "show-ref", "--verify", "--quiet", name])
    return version if version and known.returncode == 0 else ""


def _shallow(remote: _Remote, version: str, into: Path) -> bool:
    """Fetch only the tip of a branch or tag; return False if that needs a full clone."""
    if re.fullmatch(r"[0-9a-f]{7,40}", version):
        return False
    words = ["clone", "--quiet", "--depth", "1", *(["--branch", version] if version else [])]
    url = remote.url
    # Git would clone a path with hard links and its whole history.
    whole = f"file://{Path(url).absolute()}" if not is_remote(url) and "://" not in url else url
    ended = _run([*words, "--", whole, str(into)], remote.environment)
    if ended.returncode == 0:
        return True
    if re.search(r"Remote branch .* not found|dumb http|shallow", ended.stderr):
        return False
    raise _failed(ended, remote)


def _commit(repository: Path, version: str) -> str:
    for name in (f"origin/{version}", version) if version else ("HEAD",):
        words = ["-C", str(repository), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
        ended = _run(words)
        if ended.returncode == 0:
            return ended.stdout.strip()
    return ""


def _close(repository: Path, version: str) -> str:
    words = ["for-each-ref", "--format=%(refname:lstrip=3)", "refs/remotes/origin"]
    known = _run(["-C", str(repository), *words]).stdout.split()
    near = find_alike(version, known, 3)
    return f"; did you mean {near}?" if near else ""


def _git(remote: _Remote, *words: str) -> str:
    ended = _run(list(words), remote.environment)
    if ended.returncode != 0:
        raise _failed(ended, remote)
    return ended.stdout


def _failed(ended: "subprocess.CompletedProcess[str]", remote: _Remote) -> UserError:
    output = ended.stderr.replace(remote.url, remote.shown).strip()
    # Git may report a redirect with the same user and password.
    output = re.sub(r"://[^/@\s]+@", "://", output)
    lines = [line for line in output.splitlines() if line.strip()]
    reason = " ".join(lines[-3:]) or f"git ended with {ended.returncode}"
    if _NO_ACCESS.search(output):
        return UserError(
            f"the repository cannot be read ({reason})",
            where=remote.shown,
            do="Correct the URL, or set up a credential helper or an SSH agent so that `git clone`"
            " works without a prompt",
        )
    return UserError(
        f"the project cannot be fetched ({reason})",
        where=remote.shown,
        do="Check that `git clone` works with this URL",
    )


def _run(
    words: list[str], more: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.CompletedProcess[str]":
    environment = {
        **os.environ,
        **more,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_SSH_COMMAND": os.environ.get("GIT_SSH_COMMAND", "ssh -o BatchMode=yes"),
        "LC_ALL": "C",
    }
    try:
        return subprocess.run(
            ["git", *words], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=_FETCH_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(
            "the program git is not installed", where="git", do="Install it, or pass a folder"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"git did not finish within {_FETCH_S / 60:.0f} min", where=words[0],
            do="Clone the repository yourself and pass the folder",
        ) from None  # fmt: skip
