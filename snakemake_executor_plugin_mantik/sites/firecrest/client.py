"""pyfirecrest's client with our pooled HTTP client, and the requests that it lacks."""

import io
import ssl
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final, Protocol

import httpx
from firecrest.v2 import AsyncFirecrest

from .. import http
from .answers import answer_body

kind: ContextVar[str] = ContextVar("kind", default="other")
"""The kind under which current requests are counted."""

_OCTETS: Final = "application/octet-stream"


class Authorization(Protocol):
    """The source of pyfirecrest's authentication headers."""

    async def auth_headers(self) -> Mapping[str, str]: ...


class FirecrestSession(http.HttpClient):
    """The HTTP client below pyfirecrest's."""

    def build_request(self, *arguments: Any, **named: Any) -> httpx.Request:
        """Like `httpx.AsyncClient.build_request`.

        pyfirecrest completes uploads with a text as `data`, which makes HTTPX warn, and sets no
        time-out for parts of an upload.
        """
        if named.get("timeout", self.timeout) is None:
            del named["timeout"]
        if isinstance(named.get("data"), str):
            named["content"] = named.pop("data")
        return super().build_request(*arguments, **named)


class FirecrestClient(AsyncFirecrest):  # type: ignore[misc] # pyfirecrest is not typed
    """pyfirecrest's client with our HTTP client.

    pyfirecrest's own HTTP client has no time-outs and keeps idle connections for 5 s, less than the
    time between two polls of jobs. It would also wait without a limit after 429.
    """

    def __init__(
        self,
        url: str,
        authorization: Authorization,
        *,
        tls: ssl.SSLContext,
        timeout: httpx.Timeout,
        session: httpx.AsyncClient,
    ) -> None:
        super().__init__(url, authorization, verify=tls)
        self._session = session
        self.timeout = timeout
        self.num_retries_rate_limit = 0
        self.disable_client_logging = True
        # `files` decides whether a file is transferred directly or by a transfer job.
        self.MAX_DIRECT_UPLOAD_SIZE = 0

    async def status(self) -> tuple[dict[str, Any], str]:
        """Return the answer about all systems, whatever its form, and the server's version."""
        response = await self._get_request(endpoint="/status/systems")
        self._check_response(response, 200, return_json=False)
        return answer_body(response), str(response.headers.get("f7t-appversion", ""))

    async def all_partitions(self, system: str) -> Any:
        """Return the partitions, hidden ones too, which servers since 2.5.4 leave out otherwise."""
        response = await self._get_request(
            endpoint=f"/status/{system}/partitions", params={"show_hidden": "true"}
        )
        return self._check_response(response, 200)["partitions"]

    async def store(self, system: str, directory: str, name: str, content: bytes) -> None:
        """Write a file directly, replace an old one; pyfirecrest's upload() needs a local file."""
        # Sent piece by piece, and closed: requests are part of cycles, and live on for long.
        with io.BytesIO(content) as file:
            response = await self._post_request(
                endpoint=f"/filesystem/{system}/ops/upload",
                params={"path": directory},
                files={"file": (name, file)},
            )
        self._check_response(response, 204)

    async def load(self, system: str, path: str) -> bytes:
        """Read a file directly; pyfirecrest's download() requests its size first.

        Raises:
            ValueError: the answer is not from the server.
        """
        response = await self._get_request(
            endpoint=f"/filesystem/{system}/ops/download", params={"path": path}
        )
        self._check_response(response, 200, return_json=False)
        if not str(response.headers.get("Content-Type", "")).startswith(_OCTETS):
            raise ValueError("no file")
        content: bytes = response.content
        return content

    def stream(self, url: str, offset: int) -> Any:
        """Open a stream of an object in the site's store from `offset` on."""
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        return self._session.stream("GET", url, headers=headers)
