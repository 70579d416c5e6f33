from pathlib import Path

import pytest

from tests.support.trial import Trial


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)
