"""Links of the documentation lead somewhere, also where the pages are shown elsewhere."""

import re
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/mantik-ai/snakemake-executor-plugin-mantik/"
FILES = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
ELSEWHERE = ["docs/intro.md", "docs/further.md"]
"""Shown in Snakemake's plugin catalogue."""
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "workflows/*/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)


def links(text: str) -> list[str]:
    """Return the targets of a page's links and pictures, code left out."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    inline = re.findall(r"\]\(([^)\s]+)\)", text)
    defined = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, flags=re.MULTILINE))
    used = re.findall(r"\]\[([^\]]+)\]", text)
    assert set(used) == set(defined), "a label of a link that is not defined, or not used"
    return inline + [defined[label] for label in used]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolve(page: Path, link: str) -> tuple[Path, str] | None:
    """Return the file of this project and the anchor that a link leads to, if it stays here."""
    target, _, anchor = link.partition("#")
    if target.startswith(REPOSITORY):
        kind, _, path = target.removeprefix(REPOSITORY).partition("/main/")
        assert kind in {"blob", "tree"}, link
        return ROOT / path, anchor
    if "://" in target or target.startswith("mailto:"):
        return None
    return (page.parent / target if target else page).resolve(), anchor


@pytest.mark.parametrize("name", PAGES)
def test_a_page_s_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in links(page.read_text()):
        if (found := resolve(page, link)) is None:
            continue
        target, anchor = found
        assert target.exists(), f"{link} leads to no file"
        assert not anchor or anchor in anchors(target), f"{link} leads to no heading"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_page_of_the_catalogue_has_no_relative_link(name: str) -> None:
    found = links((ROOT / name).read_text())
    assert found
    assert all("://" in link for link in found)


def test_the_package_index_shows_no_relative_link() -> None:
    metadata = ProjectMetadata(str(ROOT), PluginManager())
    found = links(metadata.core.readme)
    assert f"{REPOSITORY}blob/main/docs/moving.md" in found
    assert all("://" in link for link in found)
    assert len(found) == len(links((ROOT / "README.md").read_text()))
    # GitHub shows a page around a picture, and the file itself elsewhere.
    pictures = re.findall(r"!\[[^\]]*\]\((\S+)\)", metadata.core.readme)
    assert {picture.rpartition("/")[0] for picture in pictures} == {f"{FILES}main/docs/pictures"}
    assert all((ROOT / picture.removeprefix(f"{FILES}main/")).exists() for picture in pictures)
