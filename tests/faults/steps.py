"""What the requests of a run are for, told from their paths: the kinds that faults happen to."""

import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from tests.support.proxy import Request

_UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_ATTEMPTS = r"/\.mantik/attempts/\d+"
_PATH_KEYS = ("path", "sourcePath", "source_path")
_END = r"/?(\?|&| |$)"
_POOL = r"/\.mantik/pools/\w+"

_UNICORE = (
    ("submit", rf"^POST .*/rest/core/jobs{_END}"),
    ("abort", rf"^PUT .*/files/.*{_POOL}/stop\."),
    ("submit", rf"^PUT .*/files/.*{_POOL}/"),
    ("marker", rf"^GET .*/files/.*{_POOL}/marks\."),
    ("list", rf"^GET .*/files/.*{_POOL}{_END}"),
    ("find", r"^GET .*/rest/core/jobs/?\?.*tags="),
    ("abort", r"^POST .*/rest/core/jobs/.*/actions/abort"),
    ("status", r"^GET .*/rest/core/jobs/"),
    ("forget", r"^DELETE .*/rest/core/jobs/"),
    ("extend", r"^PUT .*/rest/core/jobs/"),
    ("revoke", rf"^POST .*/files/.*{_ATTEMPTS}/{_UUID}{_END}"),
    ("make", rf"^POST .*/files/.*{_ATTEMPTS}{_END}"),
    ("marker", rf"^GET .*/files/.*{_ATTEMPTS}/{_UUID}\.\d+"),
    ("claim", rf"^GET .*/files/.*{_ATTEMPTS}/{_UUID}{_END}"),
    ("list", rf"^GET .*/files/.*{_ATTEMPTS}{_END}"),
    ("remove", r"^DELETE .*/files/"),
    ("upload", r"^PUT .*/files/.*/\.mantik/bundles/"),
    ("archive", r"^GET .*/files/.*/\.mantik/work/.*\.tar"),
    ("file", r"^GET .*/files/.*/out/."),
)
_FIRECREST = (
    ("submit", rf"^POST .*/compute/[^/]+/jobs{_END}"),
    ("submit", rf"^POST .*/ops/upload.*{_POOL}"),
    ("marker", rf"^GET .*/ops/\w+\?.*{_POOL}/marks\."),
    ("list", rf"^GET .*/ops/ls\?.*{_POOL}{_END}"),
    ("abort", r"^DELETE .*/compute/[^/]+/jobs/"),
    ("status", r"^GET .*/compute/[^/]+/jobs/\w"),
    ("find", r"^GET .*/compute/[^/]+/jobs"),
    ("revoke", rf"^POST .*/ops/mkdir.*{_ATTEMPTS}/{_UUID}{_END}"),
    ("make", rf"^POST .*/ops/mkdir.*{_ATTEMPTS}{_END}"),
    ("marker", rf"^GET .*/ops/\w+\?.*{_ATTEMPTS}/{_UUID}\.\d+"),
    ("claim", rf"^GET .*/ops/\w+\?.*{_ATTEMPTS}/{_UUID}{_END}"),
    ("list", rf"^GET .*/ops/ls\?.*{_ATTEMPTS}{_END}"),
    ("remove", r"^DELETE .*/ops/rm"),
    ("upload", r"^POST .*/(ops/upload|transfer/upload).*/\.mantik/bundles"),
    ("make", r"^POST .*/ops/mkdir.*/\.mantik/bundles"),
    ("archive", r"^GET .*/ops/\w+\?.*/\.mantik/work/.*\.tar"),
    ("file", r"^GET .*/ops/\w+\?.*/out/."),
    ("transfer", r"^POST .*/transfer/download"),
    ("store", r"^GET .*/store/"),
    ("upload", r"^(PUT|POST) .*/store/"),
    ("token", r"^POST .*/token"),
)
KINDS: Mapping[str, Iterable[tuple[str, str]]] = {"unicore": _UNICORE, "firecrest": _FIRECREST}
"""For each API, the kinds of requests and the pattern that tells one; the first that fits counts.

A pattern is searched for in the method, the target and the path that a JSON body names.
"""

STEPS: Mapping[str, tuple[str, ...]] = {
    "stage": ("make", "upload"),
    "submit": ("submit",),
    "watch": ("list", "status", "find"),
    "fetch": ("marker", "archive", "file", "transfer", "store"),
    "cancel": ("revoke", "abort", "list", "status"),
}
"""The kinds of requests that each step makes; not each API has all of them."""


def kind_of(api: str, request: Request) -> str:
    """What a request is for; `other` for what belongs to no step."""
    text = f"{request.method} {unquote(request.target)} {_named_path(request)}"
    return next((kind for kind, pattern in KINDS[api] if re.search(pattern, text)), "other")


def _named_path(request: Request) -> str:
    """The path in a request's body, where it has one that is JSON."""
    if not request.body.startswith(b"{"):
        return ""
    try:
        named = json.loads(request.body)
    except ValueError:
        return ""
    return next((str(named[key]) for key in _PATH_KEYS if key in named), "")
