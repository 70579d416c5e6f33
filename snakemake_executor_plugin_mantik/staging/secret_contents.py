"""Recognition of secrets by content: private keys, tokens of known services, passwords in settings.

A small table instead of a library such as detect-secrets, which takes some 60 ms for each file and
reports checksums as secrets: a run examines thousands of files before its first job, and a false
alarm costs its user more than here a format that is not in the table.
"""

import re
from pathlib import PurePath
from typing import Final

from snakemake_executor_plugin_mantik.common.secret_names import names_secret

_WHOLE: Final = 1 << 20
"""Files up to so many bytes are searched completely."""

_BEGINNING: Final = 1 << 16
"""Bytes that are searched of a larger file, which is rather data than settings."""

_SNIFFED: Final = 1 << 12
"""Bytes in which a binary file has a zero byte."""

_KEY: Final = "a private key"
_ADDRESS: Final = "the secret address of a webhook"

_TABLE: Final = tuple(
    (what, marks, re.compile(pattern, re.MULTILINE))
    for what, marks, pattern in [
        (
            _KEY,
            (b"PRIVATE KEY",),
            rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----[ \t]*(\r|\n|\\[nr])"  # PEM, PGP, …
            rb"|---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----|^SSH PRIVATE KEY FILE FORMAT",
        ),
        (_KEY, (b"PuTTY-User-Key-File-",), rb"^PuTTY-User-Key-File-\d"),
        (_KEY, (b"AGE-SECRET-KEY-",), rb"\bAGE-SECRET-KEY-1[0-9A-Z]{20}"),
        (_KEY, (b"secret key",), rb"^untrusted comment: .*secret key"),
        (
            "a key of AWS",
            (b"AKIA", b"ASIA"),
            # The id alone is no secret: the key stands near it.
            rb"\bA[KS]IA[A-Z2-7]{16}\b[\s\S]{0,200}?(?<![\w+/=])(?P<secret>[\w+/]{40})(?![\w+/=])",
        ),
        ("a token of GitHub", (b"gh", b"github_pat_"),
         rb"\b(gh[pousr]_(?P<secret>\w{36,255})|github_pat_(?P<more>\w{60,255}))\b"),
        ("a token of GitLab", (b"glpat-",), rb"\bglpat-(?P<secret>[\w-]{20,})"),
        ("a token of Slack", (b"xox", b"xapp-"),
         rb"\b(xox[abeoprs]|xapp)-(?P<secret>[\dA-Za-z-]{20,})"),
        (
            _ADDRESS,
            (b"hooks.slack.com", b"/api/webhooks/", b"webhook.office.com", b"/hooks/"),
            rb"https://hooks\.slack\.com/(services|workflows|triggers)/(?P<secret>[\w/]{20,})"
            rb"|https://(\w+\.)?discord(app)?\.com/api/webhooks/\d+/[\w-]{20,}"
            rb"|https://[\w.-]+\.webhook\.office\.com/webhookb2/[\w@-]{20,}"
            rb"|https?://[\w.:-]+/hooks/(?P<more>[a-z0-9]{26})\b",
        ),
        (
            "an address for --mantik-notify",
            (b"mantik",),
            rb"(?i:\bmantik[-_]notify)[\"']?[ \t]*[:=\s][^\r\n]*?\b(curl|wget)\b[^\r\n]*?https?://",
        ),
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

_SETTINGS: Final = frozenset(
    [
        ".yaml",
        ".yml",
        ".json",
        ".toml",
        ".ini",
        ".cfg",
        ".conf",
        ".config",
        ".env",
        ".properties",
        ".txt",
    ]
)
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
    return _find_setting(content[:_BEGINNING], kind) if kind in _SETTINGS else ""


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
