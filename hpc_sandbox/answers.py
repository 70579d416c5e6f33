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


def _selected(properties: Mapping[str, Any], fields: str | None) -> dict[str, Any]:
    """Return the properties that `?fields=` selects; `!name` excludes one."""
    names = [name for name in (fields or "").split(",") if name]
    without = {name[1:] for name in names if name.startswith("!")}
    only = {name for name in names if not name.startswith("!")}
    return {
        name: value
        for name, value in properties.items()
        if name not in without and (not only or name in only)
    }


def links(urls: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the `_links` of a resource."""
    return {name: {"href": url} for name, url in urls.items()}


def _page(kind: str, base: str, ids: Iterable[str], offset: int, number: int) -> dict[str, Any]:
    """Return a page of a list: URLs only, with links to the previous and next pages."""
    everything = list(ids)
    urls = {"self": f"{base}/?offset={offset}&num={number}"}
    if offset + number < len(everything):
        urls["next"] = f"{base}/?offset={offset + number}&num={number}"
    if offset > 0:
        before = max(0, offset - number)
        urls["previous"] = f"{base}/?offset={before}&num={number}"
    shown = everything[offset : offset + number]
    return {kind: [f"{base}/{name}" for name in shown], "_links": links(urls)}


def shown(request: Request, properties: Mapping[str, Any]) -> Response:
    """Return a resource, or the properties of it that the request selects with `?fields=`."""
    return JSONResponse(_selected(properties, request.query_params.get("fields")))


def paged(request: Request, kind: str, base: str, ids: Iterable[str]) -> Response:
    """Return the page of a list that the request selects with `?offset=&num=`."""
    try:
        offset = int(request.query_params.get("offset", "0"))
        number = int(request.query_params.get("num", _PAGE))
    except ValueError:
        return empty(404)
    return JSONResponse(_page(kind, base, ids, offset, number))
