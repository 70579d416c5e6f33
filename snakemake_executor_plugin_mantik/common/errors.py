"""The errors of the mantik executor.

Every error says three things: what happened, where (file and key, site and job), and what to do.
The class says whose it is, and so what a caller may do about it:

    MantikError
    ├── UserError               the user's: reported at once, never retried
    │   ├── ConfigError         one or more mistakes in configuration files, all of them
    │   ├── CredentialError     credentials that are missing or that a site refuses
    │   ├── WorkflowNotRunnable rules or options of a workflow that the executor cannot run
    │   └── PlaceTaken          another workflow owns a workspace, or another controller leads it
    ├── SiteError               what a site answered, or that it did not
    │   ├── SiteUnreachable     no answer, or none that can be trusted: the act may have happened
    │   ├── SiteBusy            the site asks to come later: the act did not happen
    │   ├── SiteUnauthorized    the credentials are not, or no longer, accepted: it did not happen
    │   ├── SiteNotFound        there is no such file or job: proves nothing about a running job
    │   └── SiteRejected        a definite no: the act did not happen and will not if repeated
    ├── TransferError           a file that came back is not what the job made; can be fetched again
    │   └── OutputsLost         what the job made is not to be had any more, however often asked
    ├── OutputMissing           a job ended well without making an output that it promised
    └── JournalError            the journal cannot be used (damaged, newer) or written (a full disk)
        └── JournalLocked       another controller holds it
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass


def printable(text: str) -> str:
    """Text of a server or a job, without the control characters that could change a terminal."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(c for c in text if c in "\n\t" or c.isprintable())


def one_line(text: str) -> str:
    """The same in one line, so that no text can look like more of ours."""
    return printable(text).replace("\n", " ")


def json_text(value: object) -> str:
    """A value as JSON for people and programs; what could change a terminal is escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _sentence(text: str) -> str:
    """The text with one full stop at its end, unless it is a question; three of them stay."""
    if text.endswith("?"):
        return text
    return f"{text if text.endswith('..') else text.removesuffix('.')}."


class MantikError(Exception):
    """Something went wrong; `what` happened, `where`, and what to `do` now.

    Each part is a sentence or a short text without a final full stop, which is left out where a
    server's words bring one; `where` and `do` may be empty where `what` says it all.
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
    """A mistake that only the user can mend."""


@dataclass(frozen=True)
class Mistake:
    """One mistake in a configuration file.

    Attributes:
        file: the file's path as the user gave it.
        key: the offending entry as a dotted path (`Resources.Nodes`), empty for the whole file.
        message: what was found and what is allowed, one line.
    """

    file: str
    key: str
    message: str

    def __str__(self) -> str:
        return (
            f"{self.file}: {self.key}: {self.message}"
            if self.key
            else (f"{self.file}: {self.message}")
        )


class ConfigError(UserError):
    """All mistakes of all configuration files, told at once."""

    def __init__(self, mistakes: Sequence[Mistake], *, do: str = "") -> None:
        count = "one mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__(f"{count} in the configuration", do=do)
        self.mistakes = tuple(mistakes)

    def __str__(self) -> str:
        lines = [f"Nothing submitted: {self.what}.", *(f"  {mistake}" for mistake in self.mistakes)]
        return printable("\n".join([*lines, f"{self.do}."] if self.do else lines))


class CredentialError(UserError):
    """Credentials are missing, unusable or refused by a site."""


class WorkflowNotRunnable(UserError):  # noqa: N818 - reads as what it says
    """The workflow asks for something that the executor cannot do."""


class PlaceTaken(UserError):  # noqa: N818 - reads as what it says
    """Another workflow owns a workspace, or another controller of this one leads it."""


class SiteError(MantikError):
    """What a site answered, or that it did not answer.

    Attributes:
        status: the HTTP status where there was an answer, else None.
    """

    def __init__(
        self, what: str, *, where: str = "", do: str = "", status: int | None = None
    ) -> None:
        super().__init__(what, where=where, do=do)
        self.status = status


class SiteUnreachable(SiteError):  # noqa: N818
    """No answer, or one that cannot be trusted (time-out, reset, 5xx, cut body).

    Whether the act happened is unknown. What is idempotent may be repeated as long as it takes;
    a submission must be looked up first.
    """


class SiteBusy(SiteError):  # noqa: N818
    """The site asks to come later (429, 503 with Retry-After); the act did not happen.

    Attributes:
        retry_after: seconds to wait as the site said, else None.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        do: str = "",
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(what, where=where, do=do, status=status)
        self.retry_after = retry_after


class SiteUnauthorized(SiteError):  # noqa: N818
    """The site does not accept the credentials (any more); the act did not happen."""


class SiteNotFound(SiteError):  # noqa: N818
    """There is no such file or job, as far as the site knows just now."""


class SiteRejected(SiteError):  # noqa: N818
    """A definite no of the site; repeating the request will not help."""


class TransferError(MantikError):
    """A file that came back differs from what the job made; it can be fetched again."""


class OutputsLost(TransferError):  # noqa: N818
    """What a job made is not to be had any more, however often it is asked for."""


class OutputMissing(MantikError):  # noqa: N818
    """A job ended with 0 without making an output that its rule promises."""


class JournalError(MantikError):
    """The journal cannot be used or written: locked, damaged, too new, or the disk is full."""


class JournalLocked(JournalError):  # noqa: N818
    """Another controller holds the journal."""
