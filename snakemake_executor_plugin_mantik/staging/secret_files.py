"""Recognition of files that must not leave this machine, for everything that uploads files.

A site's administrators and every process of the user there can read the files of a job. So a file
from which a credential was read is never uploaded, nor is a copy of it. Files that look like a
secret are only uploaded if `Site: Include` names them. As project files they are left out; a rule
or a command that names them, or a directory with them, is refused.
"""

import errno
import filecmp
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Final, Protocol

from ..common.errors import UserError, one_line
from ..common.secret_names import names_secret
from ..common.state_directory import read_umask
from ..sites.credentials import credential_files

_MOST_NAMED: Final = 20

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
"""Directories in which programs keep secrets."""


class CredentialFiles:
    """The files from which credentials are read, including links and hard links to them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Find the existing files that an environment's variables name."""
        self._files: list[tuple[str, Path, os.stat_result]] = []
        for variable, path in credential_files(environ).items():
            with suppress(OSError):  # reported where the credential is read
                self._files.append((variable, path.resolve(), path.stat()))

    def why(self, local: str, status: os.stat_result) -> str:
        """Return whose credential a file or a copy of it holds; empty if it holds none.

        Only files of the same size are compared. An empty file is not a copy of anything.
        """
        for variable, _, own in self._files:
            if os.path.samestat(own, status):
                return variable
        for variable, original, own in self._files:
            if own.st_size == status.st_size > 0:
                with suppress(OSError):
                    if filecmp.cmp(original, local, shallow=False):
                        return f"a copy of {variable}"
        return ""

    def refuse(self, path: Path, status: os.stat_result) -> None:
        """Refuse a credential's file, and a copy of it.

        Raises:
            UserError: the file is one.
        """
        if whose := self.why(str(path), status):
            raise UserError(
                f"the file holds a credential ({whose}), which is never uploaded to a site",
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


class SecretFiles:
    """Decides which files must not leave this machine, whatever they are uploaded for.

    A credential's file and its copies never do. What looks like a secret does not, either, unless
    `include` matches it. How much is a sign depends on how the user has named a file:

    - the content, always;
    - its name, unless the user has named the file itself;
    - of a project file also its mode, and a link out of the directory.
    """

    def __init__(self, include: Matching) -> None:
        self._include = include
        self.credentials = CredentialFiles(os.environ)

    def suspicion(
        self, path: str, local: str, status: os.stat_result, *, itself: bool = False, root: str = ""
    ) -> str:
        """Return why a file may hold a secret, in a few words; empty if it does not look so.

        `path` is what `include` may match, `status` that of a link's target. The user has named the
        file `itself`, or a directory with it; or it is a project file below `root`, links resolved.
        """
        if _is_included(self._include, path):
            return ""
        if not itself:
            target = PurePath(os.path.realpath(local))
            parts = target.parts
            if root:
                if not target.is_relative_to(root):
                    return "a link out of the directory"
                parts = target.relative_to(root).parts
            if _DIRECTORIES & set(parts):
                return "in a directory of secrets"
            if any(_NAMES.fullmatch(name) for name in (PurePath(path).name, target.name)):
                return "named like a secret"
        # If the umask closes every new file, the mode proves nothing.
        closed = not status.st_mode & 0o077 and read_umask() & 0o077 != 0o077
        if root and closed:
            return f"closed to others, mode {stat.S_IMODE(status.st_mode):04o}"
        at = status.st_dev, status.st_ino
        return _content(local, (*at, status.st_size, status.st_mtime_ns, status.st_ctime_ns))

    def look_at(self, path: str, local: str) -> str:
        """Return what must not leave this machine of a file or directory that the user has named.

        The result lists files with the reasons, and is empty if there are none. `path` is what
        `include` may match. What does not exist is passed over.
        """
        found: dict[str, str] = {}
        with suppress(UserError):  # it is refused when it is uploaded
            for at, here, status in walk(Path(local), path, lenient=True):
                if stat.S_ISDIR(status.st_mode):
                    continue
                if whose := self.credentials.why(str(here), status):
                    found[at] = f"a credential, {whose}, which is never uploaded"
                elif why := self.suspicion(at, str(here), status, itself=at == path):
                    found[at] = why
        return _named(found)


@lru_cache(maxsize=1 << 16)
def _content(local: str, key: tuple[int, ...]) -> str:
    del key  # identifies the content
    try:
        return find_secret(local)
    except OSError:
        return ""  # reported when it is uploaded


def _is_included(include: Matching, path: str) -> bool:
    """Check whether patterns match a path; to one outside the directory, they are relative."""
    parts = PurePath(os.path.normpath(path)).parts
    below = [part for part in parts if part not in ("/", "..")]
    first = 1 if below == list(parts) else len(below)
    return any(include.matches("/".join(below[at:])) for at in range(first))


Found = tuple[str, Path, os.stat_result]
"""Path in the workspace, local path, status."""


def walk(
    root: Path, path: str, made: Mapping[str, str] | None = None, *, lenient: bool = False
) -> list[Found]:
    """Return a file, or all files and empty directories below a directory.

    Symbolic links count as their targets. Links that lead nowhere or back to a directory above
    them, and special files, are left out. A link in `made` (path to target) was made by a job and
    means a place at its site: files outside the directory that it happens to lead to here are not
    uploaded. With `lenient` what cannot be examined is left out, too, and all else is found.

    Raises:
        UserError: the path itself is neither a file nor a directory.
        OSError: it cannot be examined.
    """
    found: list[Found] = []

    def add(local: Path, at: str, above: frozenset[tuple[int, int]]) -> None:
        if made and at in made and local.is_symlink() and os.readlink(local) == made[at]:
            inside = os.path.realpath(root.parent if local == root else root)
            if not os.path.realpath(local).startswith(f"{inside}{os.sep}"):
                return
        try:
            status = local.stat()
        except OSError as error:
            if lenient or (local != root and error.errno in (errno.ENOENT, errno.ELOOP)):
                return  # a link to nowhere, or a file that has just gone
            raise
        if not stat.S_ISDIR(status.st_mode):
            if stat.S_ISREG(status.st_mode):
                found.append((at, local, status))
            elif local == root:  # reading a named pipe might never end
                raise UserError(
                    "it is neither a file nor a directory, and cannot be uploaded",
                    where=str(root),
                    do="Use a file as input, or run the rule here (localrules:)",
                )
            return
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            return
        try:
            names = sorted(os.listdir(local))
        except OSError:
            if lenient:
                return
            raise
        if not names:
            found.append((at, local, status))
        for name in names:
            add(local / name, f"{at}/{name}", above | {identity})

    add(root, path, frozenset())
    return found


class Withheld:
    """Project files below a directory that are withheld; `str()` gives a line that reports them."""

    def __init__(self, directory: Path, include: Matching) -> None:
        """Withhold secrets of `directory` that `include` does not match, and credentials always."""
        self._directory = directory
        self._root = os.path.realpath(directory)
        self._files = SecretFiles(include)
        self._secret: dict[str, str] = {}
        self._never: dict[str, str] = {}

    def why(self, path: str, status: os.stat_result) -> str:
        """Return why a file must not be uploaded, and record it; empty if it may be.

        `path` is relative to the directory; `status` is that of a link's target.
        """
        local = os.path.join(self._directory, path)
        if whose := self._files.credentials.why(local, status):
            self._never[path] = whose
            return f"it holds a credential ({whose})"
        if why := self._files.suspicion(path, local, status, root=self._root):
            self._secret[path] = why
            return f"it may hold a secret ({why})"
        return ""

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


# Contents: private keys, tokens of known services, passwords in settings. A small table instead of
# a library such as detect-secrets, which takes some 60 ms for each file and reports checksums as
# secrets: a run examines thousands of files before its first job, and a false alarm costs its user
# more than here a format that is not in the table.

_WHOLE: Final = 1 << 20
"""Files up to so many bytes are searched completely."""

_BEGINNING: Final = 1 << 16
"""Bytes that are searched of a larger file, which is rather data than settings."""

_SNIFFED: Final = 1 << 12
"""Bytes in which a binary file has a zero byte."""

_KEY: Final = "a private key"

_TABLE: Final = tuple(
    (what, marks, re.compile(pattern, re.MULTILINE))
    for what, marks, pattern in [
        (_KEY, (b"PRIVATE KEY",),
         rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----[ \t]*(\r|\n|\\[nr])"  # PEM, PGP, …
         rb"|---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----|^SSH PRIVATE KEY FILE FORMAT"),
        (_KEY, (b"PuTTY-User-Key-File-",), rb"^PuTTY-User-Key-File-\d"),
        (_KEY, (b"AGE-SECRET-KEY-",), rb"\bAGE-SECRET-KEY-1[0-9A-Z]{20}"),
        (_KEY, (b"secret key",), rb"^untrusted comment: .*secret key"),
        ("a key of AWS", (b"AKIA", b"ASIA"),  # the id alone is no secret: the key stands near it
         rb"\bA[KS]IA[A-Z2-7]{16}\b[\s\S]{0,200}?(?<![\w+/=])(?P<secret>[\w+/]{40})(?![\w+/=])"),
        ("a token of GitHub", (b"gh", b"github_pat_"),
         rb"\b(gh[pousr]_(?P<secret>\w{36,255})|github_pat_(?P<more>\w{60,255}))\b"),
        ("a token of GitLab", (b"glpat-",), rb"\bglpat-(?P<secret>[\w-]{20,})"),
        ("a token of Slack", (b"xox", b"xapp-"),
         rb"\b(xox[abeoprs]|xapp)-(?P<secret>[\dA-Za-z-]{20,})"),
        ("the secret address of a webhook",
         (b"hooks.slack.com", b"/api/webhooks/", b"webhook.office.com", b"/hooks/"),
         rb"https://hooks\.slack\.com/(services|workflows|triggers)/(?P<secret>[\w/]{20,})"
         rb"|https://(\w+\.)?discord(app)?\.com/api/webhooks/\d+/[\w-]{20,}"
         rb"|https://[\w.-]+\.webhook\.office\.com/webhookb2/[\w@-]{20,}"
         rb"|https?://[\w.:-]+/hooks/(?P<more>[a-z0-9]{26})\b"),
        ("an address for --mantik-notify", (b"mantik",),
         rb"(?i:\bmantik[-_]notify)[\"']?[ \t]*[:=\s][^\r\n]*?\b(curl|wget)\b[^\r\n]*?https?://"),
        ("a token of Hugging Face", (b"hf_",), rb"\bhf_(?P<secret>[A-Za-z]{34,40})\b"),
        ("a key of OpenAI or Anthropic", (b"sk-",),
         rb"\bsk-(ant-|proj-|svcacct-)?(?P<secret>[\w-]{40,})"),
        ("a key of Google", (b"AIza",), rb"\bAIza(?P<secret>[\w-]{35})\b"),
        ("a token of PyPI", (b"pypi-AgE",), rb"\bpypi-AgE[\w-]{50,}"),
        ("a token of npm", (b"npm_",), rb"\bnpm_(?P<secret>[A-Za-z0-9]{36})\b"),
        ("a token of Docker", (b"dckr_pat_",), rb"\bdckr_pat_(?P<secret>[\w-]{20,})"),
        ("a key of Stripe", (b"k_live_",), rb"\b[rs]k_live_(?P<secret>\w{20,})"),
        ("a token of Telegram", (b":AA",), rb"\b\d{8,10}:AA(?P<secret>[\w-]{33})\b"),
        ("an access token", (b"eyJ",),
         rb"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.(?P<secret>[\w-]{20,})"),
    ]
)  # fmt: skip
"""What it is, texts of which a file has one if it holds any, and the pattern.

A `secret` or `more` has to look random, so that an example as `ghp_xxxx…` is none."""

_FEWEST: Final = 8
"""How many different characters a random secret has at least."""

_SETTINGS: Final = re.compile(r"\.(ya?ml|json|toml|ini|cfg|conf(ig)?|env|properties|txt)")
"""Endings of files of settings. In code and data, `password = "…"` is mostly an example."""

_WORDS: Final = (b"pass", b"secret", b"token", b"key", b"credential")

_SETTING: Final = re.compile(
    rb"(?<![\w.-])[\"']?(?P<name>[A-Za-z][\w.-]{2,60})[\"']?[ \t]*[:=][ \t]*"
    rb"(\"(?P<double>[^\"\n]*)\"|'(?P<single>[^'\n]*)'|(?P<plain>[^\s\"'#,{}\[\]]+)"
    rb"[ \t]*(?=[#,}\r\n]|\Z))"
)
_URL: Final = re.compile(
    rb"\b[a-z][a-z0-9+]{2,15}://[^\s/:@\"'<>{}$]{1,64}:([^\s/:@\"'<>{}$*]{4,128})"
    rb"@(?!localhost\b|127\.|example\.)[\w.-]+"
)
"""Addresses with a password."""

_NO_VALUE: Final = re.compile(
    r"(null|none|nil|true|false|yes|no|on|off|optional|required|string|str|text|secret|password|passwd"
    r"|token|pass|user|username|default|example|dummy|placeholder|todo|tbd|change.?(me|it)|redacted"
    r"|your.*|my.?(password|secret|token)|x+|\*+|\.+|[<\[({$%!~/|-].*|.*[>\])}|]|.*\$\{.*|.*://.*)",
    re.IGNORECASE | re.DOTALL,
)
"""Values that stand for a secret: placeholders, variables, paths, tokens of language models."""

_SHORTEST: Final = 4
_RANDOM: Final = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w./+=~-]{16,}")
"""A `token` is also a part of a text. One that grants access is long and has digits."""


def find_secret(path: str) -> str:
    """Return what a file holds that looks like a secret, in a few words; empty if nothing does.

    Of a binary file only the first bytes are read, of a large one its beginning.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(_SNIFFED)
        if content[:2] in (b"\xff\xfe", b"\xfe\xff"):  # UTF-16, as some editors write
            content = (content[2:] + file.read(_WHOLE)).replace(b"\0", b"")
        elif b"\0" in content:
            return ""
        elif len(content) == _SNIFFED:
            content += file.read(_WHOLE - _SNIFFED + 1)
            if len(content) > _WHOLE:
                content = content[:_BEGINNING]
    for what, marks, pattern in _TABLE:
        if any(mark in content for mark in marks) and _occurs(pattern, content):
            return what
    name = PurePath(path)
    kind = name.suffix.lower() or name.name.lower()
    return _find_setting(content[:_BEGINNING], kind) if _SETTINGS.fullmatch(kind) else ""


def _occurs(pattern: re.Pattern[bytes], content: bytes) -> bool:
    for found in pattern.finditer(content):
        parts = found.groupdict()
        random = parts.get("secret") or parts.get("more")
        if random is None or len(set(random)) >= _FEWEST:
            return True
    return False


def _find_setting(content: bytes, kind: str) -> str:
    """Return which setting of a file has a secret as its value; empty if none has."""
    for address in _URL.finditer(content) if b"@" in content else ():
        if not _NO_VALUE.fullmatch(address[1].decode(errors="replace")):
            return "a password in a URL"
    lower = content.lower()
    if kind == ".txt" or not any(word in lower for word in _WORDS):
        return ""
    for found in _SETTING.finditer(content):
        name = found["name"].decode(errors="replace")
        # Names as `nextToken` in JSON are those of an API's data.
        if not names_secret(name) or (kind == ".json" and not (name.islower() or name.isupper())):
            continue
        value = found["double"] or found["single"] or found["plain"] or b""
        text = value.decode(errors="replace").strip()
        if len(text) < _SHORTEST or _NO_VALUE.fullmatch(text):
            continue
        if name.lower().endswith("token") and not _RANDOM.fullmatch(text):
            continue
        return f"its setting {name}"
    return ""
