"""Build responses and errors in firecREST's forms, and read requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request


@dataclass(eq=False)
class Failure(Exception):  # noqa: N818
    """Ends a request with an error.

    Attributes:
        message: the `message` in the body.
        caused_by: the messages of the causes.
        fields: the mistakes of a validation error: (where, name, message).
        unhandled: whether the server did not expect the error: then the body names no user, and
            the connection breaks after the response.
    """

    status: int
    message: str
    caused_by: Sequence[str] | None = None
    fields: Sequence[tuple[str, str, str]] = ()
    headers: Mapping[str, str] | None = None
    unhandled: bool = False

    def __str__(self) -> str:
        return self.message

    def body(self, user: str | None) -> dict[str, Any]:
        fields = [
            {"location": where, "name": name, "message": message}
            for where, name, message in self.fields
        ]
        return {
            "errorType": "validation" if fields else "error",
            "message": self.message,
            "causedBy": self.caused_by,
            "data": {"fields": fields} if fields else None,
            "user": None if self.unhandled else user,
        }


def invalid(where: str, name: str, message: str) -> Failure:
    """Return the failure of a request that does not match the API: a 400."""
    text = f"1 validation error:\n  {{'loc': ('{where}', '{name}'), 'msg': '{message}'}}"
    return Failure(400, text, fields=[(where, name, message)])


async def json_body(request: Request) -> dict[str, Any]:
    """Return the request's body, or raise `Failure` if it is not a JSON object."""
    try:
        body = await request.json()
    except ValueError as error:
        raise invalid("body", "0", "JSON decode error") from error
    if not isinstance(body, dict):
        raise invalid("body", "0", "Input should be a valid dictionary")
    return body


def either(body: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first of `names` in the body: the API has two styles of names."""
    return next((body[name] for name in names if body.get(name) is not None), None)


def text(body: Mapping[str, Any], *names: str, needed: bool = True) -> str:
    """Return a string of the body by any of its names, empty if absent and not needed.

    Raise `Failure` if it is needed and absent, or not a string.
    """
    value = either(body, *names)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        problem = "Field required" if value is None else "Input should be a valid string"
        raise invalid("body", names[0], problem)
    return value


def flag(request: Request, name: str) -> bool:
    """Return a boolean of the query, False if absent; raise `Failure` for another value."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0", "on", "off", "yes", "no"):
        raise invalid("query", name, "Input should be a valid boolean, unable to interpret input")
    return value in ("true", "1", "on", "yes")


def number(request: Request, name: str) -> int | None:
    """Return an integer of the query, None if absent; raise `Failure` for another value."""
    value = request.query_params.get(name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError as error:
        problem = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("query", name, problem) from error
