"""Recognise secrets by the names of variables and settings, and mask their values in texts."""

import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

_WORDS: Final = "PASSWORD|PASSWD|PASSPHRASE|SECRET|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL"
_SECRET: Final = re.compile(f"{_WORDS}|TOKEN$", re.IGNORECASE)
_ITSELF: Final = re.compile(rf"({_WORDS}|CREDENTIALS|SECRET_?KEY|TOKEN)\d*$", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return whether a variable holds a secret, judged by its name."""
    return _SECRET.search(name) is not None


def names_secret(setting: str) -> bool:
    """Return whether a setting's name ends like a secret's: `password`, but not `password_file`."""
    return _ITSELF.search(setting.replace("-", "_")) is not None


MASK: Final = "***"
_SHORTEST: Final = 4
"""The shortest secret to mask, in characters; shorter ones would match everywhere."""


def secret_values(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of the variables whose names mark them as secret."""
    for name, value in variables.items():
        if is_secret(name):
            yield value


def credential_secrets(credentials: Iterable[object]) -> Iterator[str]:
    """Yield the values in credentials of any kind, except URLs."""
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
    """Return a function that replaces each of `secrets` in a text."""
    known = sorted({s for s in secrets if len(s) >= _SHORTEST}, key=len, reverse=True)
    if not known:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, known)))
    return lambda text: pattern.sub(MASK, text)
