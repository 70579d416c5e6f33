"""The documentation as a site."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.cli.docs import config_schema
from website import reference
from website.hooks import on_page_markdown

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, which is not made if a page is missing from its navigation or a link is dead."""
    made = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(made)],
        cwd=ROOT / "website", env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return made


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        loaded = re.findall(
            r"<(?:link|script|img|iframe)\b[^>]*(?:href|src)=\"?([^\"> ]+)", page.read_text()
        )
        assert loaded
        assert [address for address in loaded if "//" in address] == [], page.name
    styles = "".join(file.read_text() for file in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?https?:", styles) == []


def test_pages_for_those_who_change_the_code_are_not_found_by_a_search(site: Path) -> None:
    found = {entry["location"] for entry in json.loads(
        (site / "search/search_index.json").read_text())["docs"]}  # fmt: skip
    assert "troubleshooting.html" in found
    assert not {page for page in found if page.startswith(("architecture", "decisions"))}


def test_links_of_the_catalogue_s_pages_stay_in_the_site(site: Path) -> None:
    text = (site / "further.html").read_text()
    assert 'href="credentials.html"' in text
    assert "blob/main/docs" not in text


def test_a_bar_in_code_in_a_table_has_no_backslash() -> None:
    row = r"| `a\|b` | c \| d |"
    assert on_page_markdown(f"`x\\|y`\n{row}") == "`x\\|y`\n| `a|b` | c \\| d |"


# Pages of the reference say what the code says.


@pytest.mark.parametrize("page", reference.pages())
def test_a_page_is_what_the_code_makes(page: str) -> None:
    made = reference.pages()[page]()
    shown = (reference.DOCS / page).read_text()
    assert shown == made, f"docs/{page} is old. Type: python -m website.reference"


def test_the_keys_of_all_parts_of_a_config_are_listed() -> None:
    assert set(config_schema()["$defs"]) == {name for name in reference.SECTIONS.values() if name}


def test_what_is_read_from_the_code_is_shown() -> None:
    keys, commands, options = (
        reference.pages()[f"{name}.md"]() for name in ("config-keys", "commands", "options")
    )
    assert "| `Poll` | a time | `15s` | Longest" in keys
    assert "| `Queue` | a text or a list | required |" in keys
    assert "| `--missed skip\\|once` |" in commands
    assert "    smk-mantik runs submit [OPTIONS] PROJECT\n" in commands
    assert "| `--mantik-presubmit N` | `100` |" in options
