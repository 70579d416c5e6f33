"""Build responses in UNICORE's forms."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_PAGE = 200
"""Default number of entries on a page of a list."""


def empty(status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response without a body, the server's form of 201, 204, 400, 403 to 406, and 432."""
    return Response(status_code=status, headers=dict(headers or {}))


def failure(status: int, message: str) -> Response:
    """Return an error with its message; nearly every failure of the server is a 500."""
    return JSONResponse({"errorMessage": message, "status": status}, status_code=status)


def no_service() -> Response:
    """Return the response to URLs that belong to no service, and to all while the server starts."""
    page = "<html><body>No service was found.</body></html>"
    return Response(page, 404, media_type="text/html")


def date(when: float) -> str:
    """Format a time as the server does, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime(when))


def links(urls: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the `_links` of a resource."""
    return {name: {"href": url} for name, url in urls.items()}


def shown(request: Request, properties: Mapping[str, Any]) -> Response:
    """Return a resource, or the properties that `?fields=` selects; `!name` excludes one."""
    names = {name for name in request.query_params.get("fields", "").split(",") if name}
    without = {name[1:] for name in names if name.startswith("!")}
    only = {name for name in names if not name.startswith("!")} or properties.keys()
    return JSONResponse(
        {name: value for name, value in properties.items() if name in only - without}
    )


def paged(request: Request, kind: str, base: str, ids: Iterable[str]) -> Response:
    """Return the page of a list that `?offset=&num=` selects: URLs, with links to other pages."""
    try:
        offset = int(request.query_params.get("offset", "0"))
        number = int(request.query_params.get("num", _PAGE))
    except ValueError:
        return empty(404)
    everything = list(ids)
    starts = {"self": offset}
    if offset + number < len(everything):
        starts["next"] = offset + number
    if offset > 0:
        starts["previous"] = max(0, offset - number)
    urls = {name: f"{base}/?offset={start}&num={number}" for name, start in starts.items()}
    page = [f"{base}/{name}" for name in everything[offset : offset + number]]
    return JSONResponse({kind: page, "_links": links(urls)})
