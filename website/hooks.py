"""What mkdocs changes in a page before it shows it."""

import re
from typing import Any

PAGES = "https://github.com/mantik-ai/snakemake-executor-plugin-mantik/blob/main/docs/"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page as this site needs it.

    Absolute links to pages, which Snakemake's catalogue needs, stay within the site. A bar in code
    in a table is a bar: GitHub needs a backslash before it, and Python-Markdown would show that.
    """
    lines = markdown.replace(f"]: {PAGES}", "]: ").split("\n")
    return "\n".join(_plain_bars(line) if line.startswith("|") else line for line in lines)


def _plain_bars(row: str) -> str:
    return re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row)
