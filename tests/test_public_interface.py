"""What docs/python.md promises to who imports from the package."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs/python.md"
NAMES = re.findall(r"^\| `([\w.]+)\.(\w+)` \|", PAGE.read_text(), re.MULTILINE)


def test_the_page_lists_what_the_modules_export() -> None:
    modules = {module for module, _ in NAMES}
    assert len(modules) == 3
    exported = {(m, name) for m in modules for name in importlib.import_module(m).__all__}
    assert set(NAMES) == exported


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_each_name_is_there_and_explains_itself(module: str, name: str) -> None:
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, str) or (found.__doc__ or "").strip()
