"""Recognition of names of variables and settings whose values are secret."""

import re
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
