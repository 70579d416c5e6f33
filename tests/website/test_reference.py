"""Pages of the reference say what the code says."""

import pytest

from snakemake_executor_plugin_mantik.cli.docs import config_schema
from website import reference


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
    assert "| `--mantik-ahead N` | `100` |" in options
