"""Read the resource that names undeclared files of a rule's jobs to fetch with their outputs."""

from typing import Final

from snakemake_executor_plugin_mantik.common.errors import UserError

FETCH: Final = "mantik_fetch"
ALL: Final = ("*",)
"""The patterns that stand for all undeclared files."""


def parse_fetch(value: object) -> tuple[str, ...] | None:
    """Return the patterns in a value of `mantik_fetch`; None without one.

    A pattern is one of the shell. It is compared with a path relative to the working directory, and
    without a slash also with the name of a file; `*` matches slashes, too.

    Raises:
        UserError: the value is no text, or a pattern can match no file below that directory.
    """
    if value is None:
        return None
    patterns = tuple(value.split()) if isinstance(value, str) else ()
    wrong = [
        pattern
        for pattern in patterns
        if not pattern.isprintable() or {"", ".", ".."} & set(pattern.split("/"))
    ]
    if not isinstance(value, str) or wrong:
        raise UserError(
            f"the resource {FETCH}={value!r} has to name files below the working directory",
            do=f'Write patterns relative to it, separated by blanks: {FETCH}="*.json plots/*"',
        )
    return patterns
