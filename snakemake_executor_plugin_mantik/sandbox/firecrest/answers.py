"""Answers and errors in firecREST's forms."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse


class Failure(Exception):  # noqa: N818
    """Ends a request with an error.

    Attributes:
        status: HTTP status.
        message: what the body says.
        caused_by: the messages of what led to it.
        fields: what is wrong with the request, for a validation error: (where, name, message).
        headers: of the answer.
        unhandled: the server did not expect it: no user in the body, and the connection breaks
            after the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        caused_by: Sequence[str] | None = None,
        fields: Sequence[tuple[str, str, str]] = (),
        headers: Mapping[str, str] | None = None,
        unhandled: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.caused_by = caused_by
        self.fields = fields
        self.headers = headers or {}
        self.unhandled = unhandled


def invalid(where: str, name: str, message: str) -> Failure:
    """The failure of a request that has not the form that the API wants: a 400."""
    text = f"1 validation error:\n  {{'loc': ('{where}', '{name}'), 'msg': '{message}'}}"
    return Failure(400, text, fields=[(where, name, message)])


def failed(failure: Failure, user: str | None) -> JSONResponse:
    """The answer that tells a failure."""
    fields = [
        {"location": where, "name": name, "message": message}
        for where, name, message in failure.fields
    ]
    body = {
        "errorType": "validation" if fields else "error",
        "message": failure.message,
        "causedBy": failure.caused_by,
        "data": {"fields": fields} if fields else None,
        "user": None if failure.unhandled else user,
    }
    return JSONResponse(body, failure.status, dict(failure.headers))


async def json_body(request: Request) -> dict[str, Any]:
    """The request's body, a JSON object.

    Raises:
        Failure: if it is none.
    """
    try:
        body = await request.json()
    except ValueError as error:
        raise invalid("body", "0", "JSON decode error") from error
    if not isinstance(body, dict):
        raise invalid("body", "0", "Input should be a valid dictionary")
    return body


def either(body: Mapping[str, Any], *names: str) -> Any:
    """The first of `names` that is in the body: the API takes snake_case and camelCase."""
    return next((body[name] for name in names if body.get(name) is not None), None)


def text(body: Mapping[str, Any], *names: str, needed: bool = True) -> str:
    """A text of the body by any of its names; empty if it is not there and not needed.

    Raises:
        Failure: if it is missing or no text.
    """
    value = either(body, *names)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        problem = "Field required" if value is None else "Input should be a valid string"
        raise invalid("body", names[0], problem)
    return value


def flag(request: Request, name: str) -> bool:
    """A yes or no of the query, no if it is not there.

    Raises:
        Failure: if it is neither.
    """
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0", "on", "off", "yes", "no"):
        raise invalid("query", name, "Input should be a valid boolean, unable to interpret input")
    return value in ("true", "1", "on", "yes")


def number(request: Request, name: str) -> int | None:
    """A whole number of the query, None if it is not there.

    Raises:
        Failure: if it is none.
    """
    value = request.query_params.get(name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError as error:
        problem = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("query", name, problem) from error
