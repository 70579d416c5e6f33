"""Answers in UNICORE's forms."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_PAGE = 200
"""Entries of a list when the request does not say."""


def empty(status: int, headers: Mapping[str, str] | None = None) -> Response:
    """An answer without a body, as the server gives for 201, 204, 400, 403, 404, 405, 406, 432."""
    return Response(status_code=status, headers=dict(headers or {}))


def failure(status: int, message: str) -> Response:
    """An error with its message; nearly every failure of the server is a 500."""
    return JSONResponse({"errorMessage": message, "status": status}, status_code=status)


def no_service() -> Response:
    """What the server answers to URLs that belong to no service, and to all while it starts."""
    page = "<html><body>No service was found.</body></html>"
    return Response(page, 404, media_type="text/html")


def date(when: float) -> str:
    """A time as the server writes it, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime(when))


def _selected(properties: Mapping[str, Any], fields: str | None) -> dict[str, Any]:
    """The properties that `?fields=` asks for; `!name` leaves one out."""
    names = [name for name in (fields or "").split(",") if name]
    without = {name[1:] for name in names if name.startswith("!")}
    only = {name for name in names if not name.startswith("!")}
    return {
        name: value
        for name, value in properties.items()
        if name not in without and (not only or name in only)
    }


def links(urls: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The `_links` of a resource."""
    return {name: {"href": url} for name, url in urls.items()}


def _page(kind: str, base: str, ids: Iterable[str], offset: int, number: int) -> dict[str, Any]:
    """A page of a list: URLs only, with links to the pages before and after."""
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
    """A resource, or what of it the request asks for with `?fields=`."""
    return JSONResponse(_selected(properties, request.query_params.get("fields")))


def paged(request: Request, kind: str, base: str, ids: Iterable[str]) -> Response:
    """The page of a list that the request asks for with `?offset=&num=`."""
    try:
        offset = int(request.query_params.get("offset", "0"))
        number = int(request.query_params.get("num", _PAGE))
    except ValueError:
        return empty(404)
    return JSONResponse(_page(kind, base, ids, offset, number))
