"""How an error reads."""

import pytest

from snakemake_executor_plugin_mantik.errors import MantikError


@pytest.mark.parametrize(
    ("what", "do", "said"),
    [
        ("no", "", "at s: no."),
        ("401: Access token is invalid.", "", "at s: 401: Access token is invalid."),
        ("401: Access token is invalid.", "Log in.", "at s: 401: Access token is invalid. Log in."),
    ],
)
def test_a_sentence_ends_once(what: str, do: str, said: str) -> None:
    assert str(MantikError(what, where="at s", do=do)) == said
