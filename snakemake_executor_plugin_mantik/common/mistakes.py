"""Collect mistakes that do not depend on one another, and report them at once."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import UserError, printable

_MOST_LISTED: Final = 20
"""Most entries of a list of mistakes."""

_SUBMITTED: Final = re.compile(r"^nothing submitted: | \(nothing submitted\)", re.IGNORECASE)
"""What each mistake says by itself, and all together say once."""


class SeveralMistakes(UserError):  # noqa: N818 - reads as what it says
    """Mistakes of different kinds, each with its own advice."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__(f"{len(errors)} kinds of mistakes")
        self.errors = tuple(errors)

    def __str__(self) -> str:
        lines = [f"Nothing submitted: the workflow has {self.what}."]
        for number, error in enumerate(self.errors, 1):
            text = _SUBMITTED.sub("", str(error))
            lines.append(f"{number}. {text[:1].upper()}{text[1:]}".replace("\n", "\n   "))
        return printable("\n".join(lines))


class MistakeCollector:
    """Runs checks one after the other, although some of them find mistakes."""

    def __init__(self) -> None:
        self._found: list[UserError] = []

    def __bool__(self) -> bool:
        """Whether a mistake was found."""
        return bool(self._found)

    @contextmanager
    def check(self) -> Iterator[None]:
        """Collect the mistake that ends the block, if one does."""
        try:
            yield
        except SeveralMistakes as error:
            self._found += error.errors
        except UserError as error:
            self._found.append(error)

    def refuse(self) -> None:
        """Report what was found.

        Raises:
            UserError: there are mistakes: the only one as it is, or all together.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise SeveralMistakes(self._found)


def shorten_list(entries: Iterable[str]) -> list[str]:
    """Return the first entries of a list of mistakes, and how many more there are."""
    entries = list(entries)
    rest = len(entries) - _MOST_LISTED
    return [*entries[:_MOST_LISTED], f"… and {rest} more"] if rest > 1 else entries
