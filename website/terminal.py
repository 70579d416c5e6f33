"""Render a recording of a terminal as one animated SVG, without scripts.

A terminal emulator (pyte) turns what a program wrote into screens. Each distinct line is drawn
once; each screen refers to its lines; one CSS animation moves from screen to screen. Without
animation (`prefers-reduced-motion`) the last screen is shown.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

import pyte

COLUMNS: Final = 80
ROWS: Final = 24
LETTER: Final = 8.4
"""The width of a character, pixels, of a monospace font of 14 px."""
LINE: Final = 18
MARGIN: Final = 14
BAR: Final = 30
"""The height of the title bar, pixels."""

STYLE: Final = """
:root {
  --back: #ffffff; --bar: #eaeef2; --edge: #d0d7de; --text: #1f2328; --faint: #59636e;
  --red: #c2242d; --green: #117a37; --yellow: #8a6100; --blue: #0860ca; --magenta: #8250df;
  --cyan: #1b7c83;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #0d1117; --bar: #1c2128; --edge: #3d444d; --text: #e6edf3; --faint: #9198a1;
    --red: #ff7b72; --green: #3fb950; --yellow: #d29922; --blue: #58a6ff; --magenta: #bc8cff;
    --cyan: #39c5cf;
  }
}
text {
  font: 14px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: var(--text); white-space: pre;
}
.title { font-size: 12px; fill: var(--faint); }
.b { font-weight: 700; }
.red { fill: var(--red); } .green { fill: var(--green); } .yellow { fill: var(--yellow); }
.blue { fill: var(--blue); } .magenta { fill: var(--magenta); } .cyan { fill: var(--cyan); }
.back { fill: var(--back); stroke: var(--edge); } .bar { fill: var(--bar); stroke: var(--edge); }
"""

_COLOURS: Final = {"brown": "yellow"}
"""Where pyte's name of a colour is not that of the style."""
_KNOWN: Final = {"red", "green", "yellow", "blue", "magenta", "cyan"}


@dataclass(frozen=True)
class Event:
    """What a program wrote to the terminal, and when: in seconds since the recording began."""

    at: float
    text: str


Line = tuple[tuple[int, str, str], ...]
"""The runs of a line: column, class and text of each."""


@dataclass(frozen=True)
class Screen:
    """What was to be seen since `at`, in seconds."""

    at: float
    lines: tuple[Line, ...]


def play(events: Iterable[Event], step: float = 0.15) -> list[Screen]:
    """Return the distinct screens, at most one per `step` seconds."""
    terminal = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(terminal)
    screens: list[Screen] = []
    for event in events:
        stream.feed(event.text)
        lines = tuple(_runs(terminal, row) for row in range(ROWS))
        if screens and event.at - screens[-1].at < step:
            screens[-1] = Screen(screens[-1].at, lines)
        elif not screens or screens[-1].lines != lines:
            screens.append(Screen(event.at, lines))
    return screens


def shorten_waits(screens: Iterable[Screen], longest: float, length: float) -> list[Screen]:
    """Return the same screens, each at most `longest` seconds after the one before.

    If they still take more than `length` seconds, all of them are shown faster.
    """
    shown: list[Screen] = []
    before, now = 0.0, 0.0
    for screen in screens:
        now += min(screen.at - before, longest)
        before = screen.at
        shown.append(Screen(now, screen.lines))
    faster = min(1.0, length / now) if now else 1.0
    return [Screen(screen.at * faster, screen.lines) for screen in shown]


def _runs(terminal: pyte.Screen, row: int) -> Line:
    runs: list[tuple[int, str, str]] = []
    for column in range(COLUMNS):
        char = terminal.buffer[row][column]
        colour = _COLOURS.get(char.fg, char.fg).removeprefix("bright")
        look = " ".join([colour] * (colour in _KNOWN) + ["b"] * char.bold)
        if runs and runs[-1][1] == look and runs[-1][0] + len(runs[-1][2]) == column:
            runs[-1] = (runs[-1][0], look, runs[-1][2] + char.data)
        else:
            runs.append((column, look, char.data))
    return tuple(
        (column, look, text.rstrip()) for column, look, text in runs if not text.isspace() and text
    )


def render(screens: Sequence[Screen], title: str, pause: float = 4.0) -> str:
    """Return the SVG.

    Args:
        screens: at least one, in the order of their times.
        title: shown in the bar above the terminal.
        pause: how long the last screen stays before the animation starts again, seconds.
    """
    width, inner = round(COLUMNS * LETTER) + 2 * MARGIN, ROWS * LINE + 2 * MARGIN
    length = screens[-1].at + pause
    number: dict[Line, int] = {}
    for screen in screens:
        for line in filter(None, screen.lines):
            number.setdefault(line, len(number))
    frames = "\n".join(
        f"{100 * screen.at / length:.2f}% {{ transform: translateX({-width * at}px) }}"
        for at, screen in enumerate(screens)
    )
    last = f"translateX({-width * (len(screens) - 1)}px)"
    drawn = "\n".join(
        f'<g id="l{at}">{"".join(_text(*run) for run in line)}</g>' for line, at in number.items()
    )
    shown = "\n".join(
        f'<g transform="translate({width * at})">'
        + "".join(
            f'<use href="#l{number[line]}" y="{row * LINE}"/>'
            for row, line in enumerate(screen.lines)
            if line
        )
        + "</g>"
        for at, screen in enumerate(screens)
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{inner + BAR}" \
viewBox="0 0 {width} {inner + BAR}" role="img" aria-label="{escape(title, {'"': "&quot;"})}">
<style>{STYLE}
.film {{ transform: {last}; animation: film {length:.1f}s step-end infinite; }}
@media (prefers-reduced-motion: reduce) {{ .film {{ animation: none; }} }}
@keyframes film {{
{frames}
100% {{ transform: {last} }}
}}
</style>
<defs>
{drawn}
</defs>
<rect x=".5" y=".5" width="{width - 1}" height="{inner + BAR - 1}" rx="8" class="back"/>
<path d="M.5 {BAR}V8.5a8 8 0 0 1 8-8H{width - 8.5}a8 8 0 0 1 8 8V{BAR}z" class="bar"/>
<text class="title" x="{width / 2}" y="{BAR - 10}" text-anchor="middle">{escape(title)}</text>
<svg x="{MARGIN}" y="{BAR + MARGIN}" width="{width - 2 * MARGIN}" height="{inner - 2 * MARGIN + 4}">
<g class="film">
{shown}
</g></svg>
</svg>
"""


def _text(column: int, look: str, text: str) -> str:
    kind = f' class="{look}"' if look else ""
    x = f' x="{column * LETTER:.1f}"' if column else ""
    # The length keeps columns together in whatever font there is.
    return (
        f'<text{x} y="{LINE - 4}"{kind} textLength="{len(text) * LETTER:.1f}">{escape(text)}</text>'
    )
