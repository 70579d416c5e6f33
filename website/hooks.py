"""What mkdocs changes in a page before it shows it."""

from typing import Any

PAGES = "https://github.com/mantik-ai/snakemake-executor-plugin-mantik/blob/main/docs/"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let absolute links to pages, which other sites need, stay within this site."""
    return markdown.replace(f"]: {PAGES}", "]: ")
