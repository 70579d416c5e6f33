"""HTTP clients that take no more of an answer than they can hold, whoever gives it.

HTTPX reads an answer to its end however long it is and however slowly it comes, and unpacks it
whatever that makes of it. A server that is broken or hostile must not fill the memory of the
machine that watches jobs, nor keep a request for ever.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx

ANSWER_BYTES: Final = 64 << 20
"""Longest answer that is read, unpacked; files that jobs made are streamed and have no limit here.

UNICORE's largest is a listing of 10,000 entries (2 MB), firecREST's a file of `DIRECT_BYTES`."""
ANSWER_PATIENCE: Final = 10.0
"""An answer's body may take that many times as long as the longest silence that is waited for."""
_ENCODINGS: Final = frozenset(("", "identity", "gzip", "x-gzip", "deflate"))
"""Each of these makes a thousand times as much of what it is given at most; two may make anything.
"""
_NO_LONGER: Final = frozenset(("content-encoding", "content-length", "transfer-encoding"))
"""Headers that are not true any more of a body that was read and unpacked."""

# They log URLs, which give access to files of an object store, and headers of answers, which
# firecREST puts tokens into that it refuses.
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)


class _Body:
    """An answer's body while it is being read."""

    def __init__(self, response: httpx.Response, patience_s: float) -> None:
        self._response = response
        self._parts: list[bytes] = []
        self._size = 0
        self._until = time.monotonic() + patience_s
        coding = response.headers.get("Content-Encoding", "").strip().lower()
        if coding not in _ENCODINGS:
            raise self._error(f"the answer is packed in an unknown way ({coding[:40]})")

    def add(self, part: bytes) -> None:
        """Take a part.

        Raises:
            httpx.RemoteProtocolError: it is too much, or too late.
        """
        self._size += len(part)
        if self._size > ANSWER_BYTES:
            raise self._error(f"the answer is longer than {ANSWER_BYTES >> 20} MiB")
        if time.monotonic() > self._until:
            raise self._error("the answer did not come to an end")
        self._parts.append(part)

    def _error(self, text: str) -> httpx.RemoteProtocolError:
        return httpx.RemoteProtocolError(text, request=self._response.request)

    def answer(self) -> httpx.Response:
        """The answer with its body in memory.

        Raises:
            httpx.RemoteProtocolError: it holds what is no text.
        """
        headers = [
            (k, v) for k, v in self._response.headers.raw if k.decode().lower() not in _NO_LONGER
        ]
        content = b"".join(self._parts)
        if b"\\ud" in content.lower() and not _is_text(content):
            raise self._error("the answer holds halves of characters")
        return httpx.Response(
            self._response.status_code,
            headers=headers,
            content=content,
            request=self._response.request,
            extensions=self._response.extensions,
        )


def _is_text(content: bytes) -> bool:
    """Whether strings in JSON are text: escapes may make halves of characters.

    No URL and no file can hold those in the end.
    """
    try:
        json.dumps(json.loads(content), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    except (ValueError, RecursionError):
        return True  # no JSON
    return True


class Client(httpx.AsyncClient):
    """An HTTP client whose answers are bounded, and looked at before anybody else gets them."""

    def __init__(
        self, *, look: Callable[[httpx.Response], None], silence_s: float, **named: Any
    ) -> None:
        """Make a client.

        Args:
            look: sees each answer; of one that is streamed the body is left out, unless the answer
                is no success.
            silence_s: how long a server may say nothing in the middle of an answer.
            named: arguments of `httpx.AsyncClient`.
        """
        super().__init__(**named)
        self._look = look
        self._patience_s = ANSWER_PATIENCE * silence_s

    async def send(
        self, request: httpx.Request, *, stream: bool = False, **named: Any
    ) -> httpx.Response:
        """Like `httpx.AsyncClient.send`; it makes every request.

        Raises:
            httpx.RemoteProtocolError: the answer is too long, or has no end.
        """
        response = await super().send(request, stream=True, **named)
        try:
            if not stream or not response.is_success:
                body = _Body(response, self._patience_s)
                async for part in response.aiter_bytes():
                    body.add(part)
                await response.aclose()
                response = body.answer()
            self._look(response)
        except BaseException:
            await response.aclose()
            raise
        return response


def post_form(
    client: httpx.Client, url: str, form: Mapping[str, str], silence_s: float
) -> httpx.Response:
    """The answer of an issuer of tokens to a form.

    Raises:
        httpx.HTTPError: there is none, or it is too long, or has no end.
    """
    with client.stream("POST", url, data=dict(form)) as response:
        body = _Body(response, ANSWER_PATIENCE * silence_s)
        for part in response.iter_bytes():
            body.add(part)
        return body.answer()
