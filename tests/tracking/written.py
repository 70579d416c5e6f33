"""A journal with runs that are to be published, and a worker that publishes them."""

from pathlib import Path
from typing import Any

from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.engine.observer import JobEnd
from snakemake_executor_plugin_mantik.journal import AttemptRecord, Journal, Used
from snakemake_executor_plugin_mantik.tracking.cursor import (
    Cursor,
    PublishedRun,
    count_unpublished,
    open_log,
)
from snakemake_executor_plugin_mantik.tracking.publishing import Publisher


class Written:
    """What a controller has written of a workflow and its jobs.

    Each worker is another one: what it knows dies with it.
    """

    def __init__(self, directory: Path, uri: str, experiment: str = "") -> None:
        self.directory, self.uri, self.experiment = directory, uri, experiment
        self.said: list[str] = []
        self.journal = Journal(directory / STATE)
        self.journal.begin_run({}, {"jobs": [], "edges": [], "rule_edges": []})
        self.key = self.journal.tracked.begin("identity")

    def data(self, name: str, **more: object) -> dict[str, Any]:
        return {
            "name": name, "uri": self.uri, "experiment_id": "", "experiment": self.experiment,
            "tags": {}, "params": {}, "config": "", **more,
        }  # fmt: skip

    def plan(self, name: str, *, job: str = "", **values: Any) -> AttemptRecord:
        record = self.journal.new_attempt(
            site="hpc1", job=job or name, rule="train", name=name, fingerprint="f", **values
        )
        self.journal.tracked.join(record, self.key)
        return record

    def track(self, record: AttemptRecord, **more: object) -> AttemptRecord:
        tags = {"mantik.attempt_id": record.id}
        self.journal.tracked.describe(record.id, self.data(record.name, **{"tags": tags, **more}))
        return record

    def job(self, name: str, **more: object) -> AttemptRecord:
        return self.track(self.plan(name), **more)

    def end(self, record: AttemptRecord, how: Any = "finished", **facts: Any) -> None:
        """`ran`, `cpu` and `waited` are of the attempt, all else of its `JobEnd`."""
        waited, ran, cpu = (facts.pop(name, None) for name in ("waited", "ran", "cpu"))
        used = Used(cpu_s=cpu, ended=facts.pop("ended", None))
        self.journal.ended(
            record.id, how, waited=waited, ran=ran, log="", used=used,
            end=JobEnd(how, **facts).facts,
        )  # fmt: skip

    def publisher(self, client: Any = None) -> Publisher:
        cursor = Cursor(self.directory)
        made = Publisher(
            self.directory, cursor,
            lambda answer: self.said.extend(answer[name] for name in ("tell",) if name in answer),
        )  # fmt: skip
        if client is not None:
            made._here.__dict__[self.uri] = client
        return made

    def publish(self, client: Any = None) -> None:
        """All that is new, by one worker."""
        publisher = self.publisher(client)
        try:
            with open_log(self.directory) as log:
                names = list(log.unpublished(publisher._cursor))
            for name in names:
                publisher.publish(name, live=True)
        finally:
            publisher._cursor.close()

    @property
    def left(self) -> int:
        return count_unpublished(self.directory)

    def published(self, name: str) -> PublishedRun:
        cursor = Cursor(self.directory)
        found = cursor.run(name)
        cursor.close()
        return found
