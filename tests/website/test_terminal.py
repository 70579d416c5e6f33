"""The recording in the README: what a terminal showed becomes an animated SVG."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from website import terminal

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
LARGEST = 150_000
"""How large the recording may be, bytes."""


def text_of(svg: str, frame: int) -> list[str]:
    root = ElementTree.fromstring(svg)
    lines = {g.get("id"): "".join(t.text or "" for t in g) for g in root.iter(f"{SVG}g")}
    film = next(g for g in root.iter(f"{SVG}g") if g.get("class") == "film")
    return [lines[use.attrib["href"].removeprefix("#")] for use in film[frame]]


def test_a_recording_becomes_an_animation() -> None:
    events = [
        terminal.Event(0.0, "$ run\r\n"),
        terminal.Event(1.0, '\x1b[33ma < b & "c"\x1b[0m\r\n0 of 2 done'),
        terminal.Event(100.0, "\r\x1b[2K2 of 2 done\r\n"),
    ]

    screens = terminal.shorten_waits(terminal.play(events), longest=2.0, length=30.0)
    svg = terminal.render(screens, "a run & more", pause=4.0)

    assert [screen.at for screen in screens] == [0.0, 1.0, 3.0]
    assert text_of(svg, 1) == ["$ run", 'a < b & "c"', "0 of 2 done"]
    assert text_of(svg, 2) == ["$ run", 'a < b & "c"', "2 of 2 done"]
    assert "animation: film 7.0s step-end infinite" in svg
    assert 'class="yellow"' in svg
    # The screens follow each other at their times.
    width = round(terminal.COLUMNS * terminal.LETTER) + 2 * terminal.MARGIN
    assert f"14.29% {{ transform: translateX({-width}px) }}" in svg
    assert f"42.86% {{ transform: translateX({-2 * width}px) }}" in svg


def test_waits_and_the_whole_are_shortened() -> None:
    screens = [terminal.Screen(at, ()) for at in (0.0, 50.0, 51.0, 99.0)]

    shown = terminal.shorten_waits(screens, longest=4.0, length=4.5)

    assert [screen.at for screen in shown] == [0.0, 2.0, 2.5, 4.5]


@pytest.mark.parametrize("name", ["run.svg", "sites.svg", "pipeline.svg", "timeline.svg"])
def test_pictures_are_images_of_their_own(name: str) -> None:
    svg = (PICTURES / name).read_text()
    root = ElementTree.fromstring(svg)

    assert len(svg.encode()) <= LARGEST
    assert {"width", "height", "viewBox"} <= set(root.attrib)
    assert "prefers-color-scheme: dark" in svg
    # An image runs no scripts and fetches nothing; nothing in it names who made it.
    assert not [word for word in ("<script", "<image", "url(http", "@import") if word in svg]
    assert not [word for word in ("/work/", "/home/", "/root/") if word in svg]
