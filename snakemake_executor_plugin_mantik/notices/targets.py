"""Define where notices go: a command, an http(s) address, or the desktop."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from snakemake_executor_plugin_mantik.common.errors import UserError, one_line
from snakemake_executor_plugin_mantik.notices.notice import Notice
from snakemake_executor_plugin_mantik.sites.addresses import tls_context

COMMAND_WAIT_S: Final = 20.0
_ANSWER_WAIT_S: Final = 10.0
"""Seconds that a command may take, and that a server has to answer."""
_OUTPUT_BYTES: Final = 2000
_SLACK_HOSTS: Final = ("hooks.slack.com", "hooks.slack-gov.com")

DESKTOP: Final = "desktop"
_OPTION: Final = "--mantik-notify"


class NotDeliveredError(Exception):
    """A notice did not arrive; the message says why, without any secret."""


class Target(Protocol):
    """Where notices go."""

    @property
    def secret(self) -> bool:
        """Whether the setting may hold a secret."""

    def deliver(self, notice: Notice) -> None:
        """Deliver a notice; wait some seconds at most.

        Raises:
            NotDeliveredError: it did not arrive.
        """


@dataclass(frozen=True)
class CommandTarget:
    """A command, which gets the notice as JSON on its standard input."""

    words: Sequence[str]
    directory: Path
    secret = False

    def deliver(self, notice: Notice) -> None:
        _run(self.words, self.directory, json.dumps(notice.as_json()))


@dataclass(frozen=True)
class DesktopTarget:
    """The desktop of this machine."""

    directory: Path
    secret = False

    def deliver(self, notice: Notice) -> None:
        if shutil.which("notify-send"):
            words = ["notify-send", "--app-name=Snakemake", "--", notice.title, notice.text]
        elif shutil.which("osascript"):
            script = "display notification (item 2 of argv) with title (item 1 of argv)"
            lines = ("on run argv", script, "end run")
            words = ["osascript", *(word for line in lines for word in ("-e", line))]
            words += [notice.title, notice.text]
        else:
            raise NotDeliveredError("there is neither notify-send nor osascript on this machine")
        _run(words, self.directory, "")


@dataclass(frozen=True)
class WebTarget:
    """An address that takes a POST."""

    url: str = field(repr=False)
    secret = True

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def deliver(self, notice: Notice) -> None:
        headers, body = compose_request(self.url, notice)
        parts = urlsplit(self.url)
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()
        request = urllib.request.Request(  # noqa: S310 - `parse_target` has checked the scheme
            address, data=body, headers=dict(headers), method="POST"
        )
        # Not httpx, which logs addresses.
        https = urllib.request.HTTPSHandler(context=tls_context(None, self.host))
        opener = urllib.request.build_opener(https, _NoRedirect)
        try:
            with opener.open(request, timeout=_ANSWER_WAIT_S):
                return
        except urllib.error.HTTPError as error:
            error.close()
            why = f"answered {error.code}"
        except TimeoutError:
            why = f"has not answered for {_ANSWER_WAIT_S:.0f} s"
        except urllib.error.URLError as error:
            why = f"cannot be reached ({getattr(error.reason, 'strerror', None) or error.reason})"
        except (OSError, HTTPException, ValueError) as error:
            why = f"did not answer in an orderly way ({type(error).__name__})"
        raise NotDeliveredError(f"{self.host} {why}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: they would turn a POST into a GET, or lead to another host."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def compose_request(url: str, notice: Notice) -> tuple[Mapping[str, str], bytes]:
    """Return the headers and the body of a POST, in the form that the server at `url` takes.

    ntfy shows a plain text. Slack and Mattermost take JSON with `text`. Every other server gets all
    values of the notice, `text` among them, and headers that let an ntfy at any host show that.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    headers = {"User-Agent": "snakemake-executor-plugin-mantik"}
    if parts.username or parts.password:
        login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
    ntfy = {"Title": notice.title, "Tags": notice.tag}
    if "ntfy" in host.split("."):
        plain = {"Content-Type": "text/plain; charset=utf-8"}
        return headers | ntfy | plain, notice.text.encode()
    headers["Content-Type"] = "application/json"
    if host in _SLACK_HOSTS:
        text = notice.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return headers, json.dumps({"text": text}).encode()
    if "/hooks/" in parts.path:  # Mattermost, at any host
        return headers, json.dumps({"text": notice.text}).encode()
    shown = {**ntfy, "Template": "yes", "Message": "{{.text}}"}
    return headers | shown, json.dumps(notice.as_json()).encode()


def parse_target(text: str, directory: Path) -> Target:
    """Return the target that a setting means; commands run in `directory`.

    Raises:
        UserError: it means none.
    """
    if not text.strip():
        raise UserError(
            "it is empty", where=_OPTION, do="Give a command, an http(s) address or 'desktop'"
        )
    if text.strip() == DESKTOP:
        return DesktopTarget(directory)
    scheme = re.match(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme is not None:
        return _web_target(text.strip(), scheme[1].lower())
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(
            f"the command cannot be read ({error})", where=_OPTION, do="Correct its quotes"
        ) from None
    program = os.path.expanduser(words[0]) if words else ""
    found = shutil.which(directory / program if "/" in program else program) if program else None
    if found is None:
        raise UserError(
            f"there is no command {program!r} on this machine",
            where=_OPTION,
            do="Give a command that can be executed, an http(s) address or 'desktop'; a command of"
            " the shell's own needs sh -c '…'",
        )
    return CommandTarget((os.path.abspath(found), *words[1:]), directory)


def _web_target(url: str, scheme: str) -> WebTarget:
    if scheme not in ("http", "https"):
        raise UserError(
            f"notices cannot be sent by {scheme}",
            where=_OPTION,
            do="Give an address that begins with https:// or http://",
        )
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or not url.isascii() or any(c.isspace() or not c.isprintable() for c in url):
        raise UserError(
            f"the {scheme} address has no host, or characters that an address cannot have",
            where=_OPTION,
            do="Copy it again from the service that takes the notices",
        )
    return WebTarget(url)


def _run(words: Sequence[str], directory: Path, given: str) -> None:
    """Run a command with a text on its standard input.

    Raises:
        NotDeliveredError: it fails, or takes too long; it is ended then.
    """
    name = Path(words[0]).name
    try:
        # Files, not pipes: a child that it leaves in the background may keep these open.
        with tempfile.TemporaryFile() as taken, tempfile.TemporaryFile() as said:
            taken.write(given.encode())
            taken.seek(0)
            process = subprocess.Popen(
                words,
                cwd=directory,
                stdin=taken,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C does not end it
            )
            try:
                code = process.wait(COMMAND_WAIT_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise NotDeliveredError(
                    f"{name} did not end within {COMMAND_WAIT_S:.0f} s and was ended"
                ) from None
            said.seek(max(0, said.tell() - _OUTPUT_BYTES))
            lines = said.read().decode(errors="replace").strip().splitlines()
    except OSError as error:
        raise NotDeliveredError(f"{name} cannot be run ({error.strerror or error})") from error
    if code:
        last = f": {one_line(lines[-1])}" if lines else ""
        raise NotDeliveredError(f"{name} ended with exit code {code}{last}")
