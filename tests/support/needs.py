"""What a test needs of the machine."""

import os

import pytest


def require(lacking: list[str], what: str) -> None:
    """Skip what cannot run for want of programs; where nothing may be skipped, fail."""
    if not lacking:
        return
    reason = f"{what} needs {', '.join(lacking)}: tests/real/install brings it, as root on Debian"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
