"""Mask secrets in texts: replace their values wherever they occur."""

import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from snakemake_executor_plugin_mantik.common.secret_names import is_secret

if TYPE_CHECKING:
    from snakemake_executor_plugin_mantik.config.model import BackendConfig

MASK: Final = "***"
_SHORTEST: Final = 4
"""The shortest secret to mask, in characters; shorter ones would match everywhere."""


def secret_values(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of the variables whose names mark them as secret."""
    for name, value in variables.items():
        if is_secret(name):
            yield value


def config_secrets(config: "BackendConfig") -> Iterator[str]:
    """Yield the secret values in the variables of a backend config's environments."""
    for environment in config.all_environments.values():
        yield from secret_values(environment.variables)


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
