"""What a run that has started knows of its jobs."""

from types import SimpleNamespace
from typing import Any, cast

from snakemake_executor_plugin_mantik.adapter.startup import ActiveRun


class Dag:
    """The jobs of a run, as Snakemake has them."""

    def __init__(self) -> None:
        self.jobs: list[SimpleNamespace] = []

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, *outputs: str) -> None:
        self.jobs.append(SimpleNamespace(input=[], output=outputs, log=[], benchmark=None))


def test_earlier_requests_learn_what_a_checkpoint_adds() -> None:
    dag, nothing = Dag(), cast(Any, None)
    run = ActiveRun(
        engine=nothing, checked=nothing, states=nothing, tracker=nothing, dag=dag, notify=nothing,
        ahead=nothing,
    )  # fmt: skip
    dag.add("first.txt")
    named = run.named
    assert named.paths == {"first.txt"}

    dag.add("post/z.txt")
    assert run.named is named
    assert named.paths == {"first.txt", "post/z.txt"}
