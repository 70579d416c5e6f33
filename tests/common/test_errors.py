"""How an error reads."""

import json

import pytest

from snakemake_executor_plugin_mantik.common.errors import MantikError, json_text, one_line


@pytest.mark.parametrize(
    ("what", "do", "said"),
    [
        ("no", "", "at s: no."),
        (
            "no main, did you mean mian?",
            "Correct it",
            "at s: no main, did you mean mian? Correct it.",
        ),
        ("401: Access token is invalid.", "", "at s: 401: Access token is invalid."),
        ("401: Access token is invalid.", "Log in.", "at s: 401: Access token is invalid. Log in."),
    ],
)
def test_a_sentence_ends_once(what: str, do: str, said: str) -> None:
    assert str(MantikError(what, where="at s", do=do)) == said


HOSTILE = "a\x1b[31m\x9b2J\u202eb\r\n  state: FINISHED"


def test_what_others_named_stays_in_its_line() -> None:
    assert one_line(HOSTILE) == "a[31m2Jb   state: FINISHED"


def test_json_shows_a_terminal_nothing_that_it_obeys() -> None:
    text = json_text({"ü": HOSTILE})

    assert json.loads(text) == {"ü": HOSTILE}
    assert "ü" in text
    assert all(c == "\n" or c.isprintable() for c in text)
