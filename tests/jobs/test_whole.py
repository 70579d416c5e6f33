"""A marker is seen whole or not at all: it gets its name last, by a rename."""

import pytest

from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from tests.support.inotify import CREATE, MODIFY, MOVED_TO, Watch
from tests.support.trial import Trial


@pytest.mark.parametrize("code", [0, 3])
def test_nothing_is_written_under_a_markers_name(trial: Trial, code: int) -> None:
    spec = trial.spec(
        f"head -c 300000 /dev/urandom > large; echo x > small; exit {code}",
        outputs=(OutputFile("large"), OutputFile("small")),
    )
    with Watch(trial.tries) as watch:
        assert trial.run(spec).returned == code
        seen = list(watch.events())
    marker = f"{spec.paths.try_id}.{code}"
    done = [mask for name, mask in seen if name == marker]
    assert [mask & MOVED_TO for mask in done] == [MOVED_TO], seen
    assert not [mask for mask in done if mask & (CREATE | MODIFY)]
