"""HTTP clients that bound the size of an answer.

HTTPX reads and unpacks an answer to its end, however long it is. A broken or hostile server must
not fill the memory of the machine that watches jobs. The callers bound how long a site's answer may
take (`sites.request_policy.longest_request_s`).
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx

ANSWER_BYTES: Final = 64 << 20
"""Maximum size of an answer, unpacked. Outputs are streamed and have no limit here.

UNICORE's largest is a listing of 10,000 entries (2 MB), firecREST's a file of the largest size that
is transferred directly (`firecrest.opening._DIRECT_BYTES`)."""
_ENCODINGS: Final = frozenset(("", "identity", "gzip", "x-gzip", "deflate"))
"""Each of these expands its input a thousandfold at most; two combined have no such limit."""
_NO_LONGER: Final = frozenset(("content-encoding", "content-length", "transfer-encoding"))
"""Headers that are no longer true of a body that was read and unpacked."""

# They log URLs, which give access to files of an object store, and headers of answers, in which
# firecREST repeats tokens that it refuses.
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)


class _Answer(httpx.Response):
    """An answer whose JSON strings hold only valid text."""

    def json(self, **named: Any) -> Any:
        """Like `httpx.Response.json`.

        Raises:
            ValueError: it is not JSON, or escapes in it make lone surrogates, which no URL and no
                file can hold.
        """
        value = super().json(**named)
        if b"\\ud" in self.content.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value


class _Body:
    """An answer's body while it is being read."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._parts: list[bytes] = []
        self._size = 0
        coding = response.headers.get("Content-Encoding", "").strip().lower()
        if coding not in _ENCODINGS:
            raise self._error(f"the answer has an unknown Content-Encoding ({coding[:40]})")

    def add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > ANSWER_BYTES:
            raise self._error(f"the answer is longer than {ANSWER_BYTES >> 20} MiB")
        self._parts.append(part)

    def _error(self, text: str) -> httpx.RemoteProtocolError:
        return httpx.RemoteProtocolError(text, request=self._response.request)

    def answer(self) -> httpx.Response:
        headers = [
            (k, v) for k, v in self._response.headers.raw if k.decode().lower() not in _NO_LONGER
        ]
        return _Answer(
            self._response.status_code,
            headers=headers,
            content=b"".join(self._parts),
            request=self._response.request,
            extensions=self._response.extensions,
        )


class HttpClient(httpx.AsyncClient):
    """An HTTP client that bounds answers and checks each before it is returned."""

    def __init__(self, *, look: Callable[[httpx.Response], None], **named: Any) -> None:
        """Make a client with the arguments of `httpx.AsyncClient`.

        `look` is called with each answer; a streamed one has no body yet if its status is 2xx.
        """
        super().__init__(**named)
        self._look = look

    async def send(
        self, request: httpx.Request, *, stream: bool = False, **named: Any
    ) -> httpx.Response:
        """Like `httpx.AsyncClient.send`, which every request passes through.

        Raises:
            httpx.RemoteProtocolError: the answer is too long or has an unknown encoding.
        """
        response = await super().send(request, stream=True, **named)
        try:
            if not stream or not response.is_success:
                body = _Body(response)
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
    client: httpx.Client, url: str, form: Mapping[str, str], timeout_s: float
) -> httpx.Response:
    """Post a form to a token issuer and return its answer, whose body may take `timeout_s`.

    Raises:
        httpx.HTTPError: there is no answer, or it is too long, has an unknown encoding or does
            not end in time.
    """
    with client.stream("POST", url, data=dict(form)) as response:
        body = _Body(response)
        until = time.monotonic() + timeout_s
        for part in response.iter_bytes():
            body.add(part)
            if time.monotonic() > until:
                raise httpx.ReadTimeout("the answer did not end in time")
        return body.answer()
