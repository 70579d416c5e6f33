"""The errors of the mantik executor.

Every error names what happened, where (file and key, site and job), and what to do. Its class tells
a caller whose error it is, and so what to do about it.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final


def printable(text: str) -> str:
    """Remove control characters, which could change a terminal, from a server's or job's text."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(c for c in text if c in "\n\t" or c.isprintable())


def one_line(text: str) -> str:
    """Make a text printable on one line, so that it cannot imitate further lines of ours."""
    return printable(text).replace("\n", " ")


def json_text(value: object) -> str:
    """Format a value as JSON; escape characters that could change a terminal."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _sentence(text: str) -> str:
    """End a text with one full stop, unless it is a question; an ellipsis stays."""
    if text.endswith("?"):
        return text
    return f"{text if text.endswith('..') else text.removesuffix('.')}."


class MantikError(Exception):
    """Something went wrong; `what` happened, `where`, and what to `do` now.

    Each part is a sentence or a short text. A final full stop, as in a server's words, is removed.
    `where` and `do` may be empty.
    """

    def __init__(self, what: str, *, where: str = "", do: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.do = do

    def __str__(self) -> str:
        what = _sentence(self.what)
        text = f"{self.where}: {what}" if self.where else what
        between = "\n" if "\n" in text else " "  # after a list its own line
        return printable(f"{text}{between}{_sentence(self.do)}" if self.do else text)


class UserError(MantikError):
    """A mistake that only the user can correct."""


@dataclass(frozen=True)
class Mistake:
    """One mistake in a configuration file.

    Attributes:
        file: the file's path as the user gave it.
        key: the offending entry as a dotted path (`Resources.Nodes`), empty for the whole file.
        message: the value found and the values allowed, one line.
    """

    file: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.file, self.key, self.message)))


class ConfigError(UserError):
    """All mistakes of all configuration files, reported at once."""

    def __init__(self, mistakes: Sequence[Mistake], *, do: str = "") -> None:
        count = "one mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__(f"{count} in the configuration", do=do)
        self.mistakes = tuple(mistakes)

    def __str__(self) -> str:
        lines = [f"Nothing submitted: {self.what}.", *(f"  {mistake}" for mistake in self.mistakes)]
        return printable("\n".join([*lines, f"{self.do}."] if self.do else lines))


class CredentialError(UserError):
    """Credentials are missing, unusable or refused by a site."""


class PlaceTaken(UserError):  # noqa: N818 - a plain name
    """Another workflow owns a workspace, or another controller of this one leads it."""


class SiteError(MantikError):
    """A site's error answer with its HTTP `status`, or a missing answer (None)."""

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        do: str = "",
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(what, where=where, do=do)
        self.status = status
        self.retry_after = retry_after


class SiteUnreachable(SiteError):  # noqa: N818
    """No answer, or one that cannot be trusted (time-out, reset, 5xx, cut body).

    Whether the action happened is unknown. Idempotent actions may be repeated as long as it takes;
    a submission must be looked up first.
    """


class SiteBusy(SiteError):  # noqa: N818
    """The site asks to retry later (mostly 429 or its own 503); the action did not happen.

    `retry_after` has the seconds to wait according to the site, else None.
    """


class SiteUnauthorized(SiteError):  # noqa: N818
    """The site does not accept the credentials (any more); the action did not happen."""


class SiteNotFound(SiteError):  # noqa: N818
    """There is no such file or job, as far as the site knows just now."""


class SiteRejected(SiteError):  # noqa: N818
    """A definite refusal; repeating the request will not help."""


class TransferError(MantikError):
    """A downloaded file differs from what the job made; it can be downloaded again."""


class OutputsLost(TransferError):  # noqa: N818
    """A job's files cannot be had any more, however often the download is repeated."""


class OutputMissing(MantikError):  # noqa: N818
    """A job ended with 0 without making an output that its rule promises."""


class JournalError(MantikError):
    """The journal cannot be used or written: locked, damaged, too new, or the disk is full."""


class JournalLocked(JournalError):  # noqa: N818
    """Another controller holds the journal."""


_MOST_LISTED: Final = 20
"""Most entries of a list of mistakes."""

_SUBMITTED: Final = re.compile(
    r"^nothing submitted: | \(nothing submitted\)|; nothing was submitted", re.IGNORECASE
)
"""What each mistake says before a run, and all together say once."""


def of_one_job(error: Exception) -> str:
    """Return an error's text without that nothing was submitted: jobs before it may have been."""
    return _SUBMITTED.sub("", str(error))


class SeveralMistakes(UserError):  # noqa: N818 - reads as what it says
    """Mistakes of different kinds, each with its own advice."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__(f"{len(errors)} kinds of mistakes")
        self.errors = tuple(errors)

    def __str__(self) -> str:
        lines = [f"Nothing submitted: the workflow has {self.what}."]
        for number, error in enumerate(self.errors, 1):
            text = of_one_job(error)
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


def find_alike(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """Return at most `most` known names that a mistaken one resembles, with "or" between them.

    Case does not count. Return '' if there are none; `cutoff` is that of `difflib`.
    """
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, most, cutoff)
    return " or ".join(by_lower[each] for each in close)


def did_you_mean(alike: str) -> str:
    """Return a question, in parentheses after a blank, about what was meant; '' for nothing."""
    return f" (did you mean {alike}?)" if alike else ""


PACKAGE: Final = "snakemake-executor-plugin-mantik"
SOURCE: Final = f"git+https://github.com/mantik-ai/{PACKAGE}"
"""What pip installs the package from; with a release on the package index, its name."""


def install_command(*extras: str) -> str:
    """Return the command that installs this package with these extras."""
    if not extras:
        return f"pip install {SOURCE}"
    return f"pip install '{PACKAGE}[{','.join(extras)}] @ {SOURCE}'"
