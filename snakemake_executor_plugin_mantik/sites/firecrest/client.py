"""pyfirecrest's client with one pooled HTTP client of ours, and the requests that it lacks."""

import ssl
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final, Protocol

import httpx
from firecrest.v2 import AsyncFirecrest

from snakemake_executor_plugin_mantik.sites import http
from snakemake_executor_plugin_mantik.sites.firecrest.answers import answer_body

kind: ContextVar[str] = ContextVar("kind", default="other")
"""What the requests that are being made count as."""

_OCTETS: Final = "application/octet-stream"


class Authorization(Protocol):
    """What pyfirecrest asks for headers."""

    async def auth_headers(self) -> Mapping[str, str]:
        """The headers that prove who we are."""
        ...


class FirecrestSession(http.HttpClient):
    """The HTTP client below pyfirecrest's."""

    def build_request(self, *arguments: Any, **named: Any) -> httpx.Request:
        """Like `httpx.AsyncClient.build_request`.

        pyfirecrest completes uploads with a text as `data`, which HTTPX warns of, and lets parts
        of an upload take for ever.
        """
        if named.get("timeout", self.timeout) is None:
            del named["timeout"]
        if isinstance(named.get("data"), str):
            named["content"] = named.pop("data")
        return super().build_request(*arguments, **named)


class FirecrestClient(AsyncFirecrest):  # type: ignore[misc] # pyfirecrest is not typed
    """pyfirecrest's client.

    Its own HTTP client keeps idle connections for 5 s, less than the time between two looks at
    jobs, and has no time-outs, and it waits for ever where it is told to come later (429).
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
        # Whether a file goes directly or through a transfer job is decided in `files`.
        self.MAX_DIRECT_UPLOAD_SIZE = 0

    async def status(self) -> tuple[dict[str, Any], str]:
        """The answer about all systems whatever its form, and the version that the server says."""
        response = await self._get_request(endpoint="/status/systems")
        self._check_response(response, 200, return_json=False)
        return answer_body(response), str(response.headers.get("f7t-appversion", ""))

    async def store(self, system: str, directory: str, name: str, content: bytes) -> None:
        """Write a file directly, an old one replaced; pyfirecrest's upload() wants a local file."""
        response = await self._post_request(
            endpoint=f"/filesystem/{system}/ops/upload",
            params={"path": directory},
            files={"file": (name, content)},
        )
        self._check_response(response, 204)

    async def load(self, system: str, path: str) -> bytes:
        """A file's bytes, directly; pyfirecrest's download() asks for its size first.

        Raises:
            ValueError: it is not the server that answered.
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
        """A context with the answer that brings an object of the site's store from `offset` on."""
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        return self._session.stream("GET", url, headers=headers)
