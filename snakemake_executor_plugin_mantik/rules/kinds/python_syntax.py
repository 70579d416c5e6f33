"""Find syntax errors in Python scripts before their jobs are submitted."""

import re
import warnings
from functools import lru_cache
from typing import Final

_MAYBE_NEWER: Final = re.compile(
    r"\s*type\s+\w+.*=|\s*(async\s+)?(def|class)\s+\w+\s*\[|.*\b[ft]r?[\"']|.*\brt[\"']|"
    r"\s*(except|match|case|lazy)\b",
    re.IGNORECASE,
)
"""Lines that a newer Python may accept: the site's Python may be newer than this one."""


@lru_cache(maxsize=1000)
def syntax_mistake(text: str) -> str | None:
    """Return line and message of a syntax error in a Python script; None if there is none.

    An error that a newer Python may not find is left to the job.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the job's own Python repeats them
            compile(text, "script", "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        if error.lineno is None or _MAYBE_NEWER.match(line) or "f-string" in error.msg:
            return None
        return f"line {error.lineno}: {error.msg} ({line.strip()})"
    except (ValueError, RecursionError, MemoryError):  # too deep for this Python
        return None
    return None
