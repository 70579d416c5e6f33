"""Projects in git: one version of a repository, by the `git` that is installed.

Credentials are git's own business (its helpers, an SSH agent): nobody is asked for them here. A
password that stands in a URL is shown to nobody: neither in what is told, nor in the list of
processes, nor in the repository that is made.
"""

import difflib
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

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.tracking.run import without_user

_FETCH_S: Final = 1800.0
"""Seconds that one command of git may take."""

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
"""A credential helper (gitcredentials(7)) for git's shell; what it tells is in the environment."""


@dataclass(frozen=True)
class _Remote:
    """A repository as git is told of it.

    Attributes:
        url: its address, without password.
        shown: the same for the user, without user, too.
        environment: what git needs to know further.
    """

    url: str
    shown: str
    environment: Mapping[str, str] = field(repr=False, default_factory=dict)


def _remote(url: str) -> _Remote:
    """A repository by its URL; user and password in it are for the same server alone."""
    shown = without_user(url)
    match = _WITH_PASSWORD.match(url)
    if match is None:
        return _Remote(url, shown)
    server = match["scheme"] + match["host"]
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    # The first one, empty, says that no other helper is asked, or told the password to keep it.
    told = {
        f"GIT_CONFIG_{what}_{first + n}": value
        for n, helper in enumerate(("", _HELPER))
        for what, value in (("KEY", f"credential.{server}.helper"), ("VALUE", helper))
    }
    secret = {_USER: unquote(match["user"]), _PASSWORD: unquote(match["password"])}
    return _Remote(shown, shown, {**secret, **told, "GIT_CONFIG_COUNT": str(first + 2)})


def is_remote(uri: str) -> bool:
    """Whether a project's URI is none of a folder here: a URL, or `user@host:path`."""
    return bool(_REMOTE.match(uri)) and not uri.startswith("file://")


def is_repository(folder: Path) -> bool:
    """Whether a folder is the top of a repository, or a bare one."""
    return (folder / ".git").exists() or (
        (folder / "HEAD").is_file() and (folder / "objects").is_dir()
    )


def fetch_project(url: str, version: str, into: Path) -> str:
    """Fetch one version of a repository, with its submodules; the commit that it is.

    Args:
        url: the repository.
        version: a branch, tag or commit; empty: what the repository's HEAD is.
        into: a directory that is not there yet.

    Raises:
        UserError: there is no git, no access or no such version.
    """
    remote = _remote(url)
    if url.startswith("-") or version.startswith("-"):
        raise UserError(
            "neither an address nor a version may begin with -",
            where=f"git {remote.shown} {version}".rstrip(), do="Check both",
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
        words = ("submodule", "--quiet", "update", "--init", "--recursive")
        _git(remote, "-C", str(into), *words)
    return _git(remote, "-C", str(into), "rev-parse", "HEAD").strip()


def branch_name(repository: Path, version: str) -> str:
    """The branch that was fetched; empty: the version is none."""
    ended = _run(["-C", str(repository), "symbolic-ref", "--short", "--quiet", "HEAD"])
    if ended.returncode == 0:
        return ended.stdout.strip()
    name = f"refs/remotes/origin/{version}"
    known = _run(["-C", str(repository), "show-ref", "--verify", "--quiet", name])
    return version if version and known.returncode == 0 else ""


def _shallow(remote: _Remote, version: str, into: Path) -> bool:
    """Fetch the tip of a branch or a tag alone; False: it is none, or not known to be one."""
    if re.fullmatch(r"[0-9a-f]{7,40}", version):
        return False
    words = ["clone", "--quiet", "--depth", "1", *(["--branch", version] if version else [])]
    url = remote.url
    # A path would be cloned with hard links, and whole.
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
    near = difflib.get_close_matches(version, known, 3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _git(remote: _Remote, *words: str) -> str:
    ended = _run(list(words), remote.environment)
    if ended.returncode != 0:
        raise _failed(ended, remote)
    return ended.stdout


def _failed(ended: "subprocess.CompletedProcess[str]", remote: _Remote) -> UserError:
    told = ended.stderr.replace(remote.url, remote.shown).strip()
    # A redirect may have been told with the same user and password.
    told = re.sub(r"://[^/@\s]+@", "://", told)
    lines = [line for line in told.splitlines() if line.strip()]
    reason = " ".join(lines[-3:]) or f"git ended with {ended.returncode}"
    if _NO_ACCESS.search(told):
        return UserError(
            f"the repository cannot be read ({reason})",
            where=remote.shown,
            do="Correct the URL, or see to it that `git clone` works without being asked for"
            " anything (a credential helper, an SSH agent)",
        )
    return UserError(
        f"the project cannot be fetched ({reason})",
        where=remote.shown,
        do="See whether `git clone` works with this URL",
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
            "the program git is not here", where="git", do="Install it, or give a folder"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"git has not come to an end within {_FETCH_S / 60:.0f} min", where=words[0],
            do="Clone the repository yourself and give the folder",
        ) from None  # fmt: skip
