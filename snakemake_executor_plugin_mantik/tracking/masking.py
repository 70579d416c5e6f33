"""Keeps secrets out of what is handed on: their values are replaced wherever they occur."""

import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

MASK: Final = "***"
_SECRET: Final = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN$|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL",
    re.IGNORECASE,
)
"""Names of variables that by their names hold secrets."""
_SHORTEST: Final = 4
"""Characters that a secret has at least; shorter ones would be found everywhere."""


def is_secret(name: str) -> bool:
    """Whether the name of a variable says that it holds a secret."""
    return _SECRET.search(name) is not None


def secret_values(variables: Mapping[str, str]) -> Iterator[str]:
    """The values of those variables whose names say that they are secret."""
    for name, value in variables.items():
        if is_secret(name):
            yield value


def credential_secrets(credentials: Iterable[object]) -> Iterator[str]:
    """What credentials hold, wherever they come from; not the addresses that they are for."""
    for credential in credentials:
        for name, value in vars(credential).items():
            if isinstance(value, str) and "url" not in name:
                yield value.removeprefix("Basic ").removeprefix("Bearer ")
                if value.startswith("Basic "):
                    user_and_password = b64decode(value.removeprefix("Basic ")).decode()
                    yield user_and_password.partition(":")[2]
            elif isinstance(value, dict):
                yield from secret_values({k: v for k, v in value.items() if isinstance(v, str)})


def make_masker(secrets: Iterable[str]) -> Callable[[str], str]:
    """What replaces each of `secrets` in a text."""
    known = sorted({s for s in secrets if len(s) >= _SHORTEST}, key=len, reverse=True)
    if not known:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, known)))
    return lambda text: pattern.sub(MASK, text)
