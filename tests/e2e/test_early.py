"""A job is submitted while its input is still on its way, at a sandbox of each API."""

import os
import sqlite3
from contextlib import closing
from typing import Final

from hpc_sandbox.faults import Fault
from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.journal import Journal
from tests.support.workflows import Project, until

PARTS: Final = 8
UPLOAD: Final = "-of-|/ops/upload$"
"""The path of a request that uploads a part; at firecREST, of any upload."""


def test_a_job_waits_for_the_rest_of_its_input_and_runs_once(
    either: Project, faulty: Sandbox
) -> None:
    """It is submitted, started and waits; this machine dies, and the next run sends the rest."""
    either.write(
        "Snakefile",
        """
        rule sum:
            input: "data.bin"
            output: "sum.txt"
            shell: "sha256sum < {input} > {output}; echo ran >> runs.txt"
        """,
    )
    size = 4 << 20 if either.place.name == "hpc1" else 5 << 20
    either.write("data.bin").write_bytes(os.urandom(PARTS * size))
    state = either.directory / ".snakemake/mantik"
    with closing(Journal(state)) as journal:
        for number in range(3):
            record = journal.new_try(
                site=either.place.name, job=f"earlier {number}", rule="r", name="n", fingerprint=""
            )
            journal.submitting(record.id, "batch")
            journal.ended(record.id, "succeeded", waited=7200.0, ran=1.0, log="")
            journal.done(record.id)
    slow = faulty.faults.add(Fault("delay", path=UPLOAD, count=None, seconds=3.0))

    def waiting() -> bool:
        with closing(sqlite3.connect(f"file:{state}/journal.sqlite?mode=ro", uri=True)) as db:
            [[number]] = db.execute("SELECT COUNT(*) FROM awaited").fetchall()
        return bool(number) and bool([*either.workspace.glob(".mantik/work/*/*/marker/state")])

    running = either.start()
    until(waiting, "the job to wait for its input")
    running.kill()
    assert not [*either.workspace.glob(".mantik/bundles/*/*/complete")]
    sent = slow.happened
    faulty.faults.clear()
    rest = faulty.faults.add(Fault("delay", path=UPLOAD, count=None))

    either.run("--nolock", "--rerun-incomplete").ok()

    assert rest.happened < sent + rest.happened
    job = [record for record in either.tries if record.rule == "sum"]
    assert len(job) == 1
    assert (either.workspace / "runs.txt").read_text() == "ran\n"
    assert either.read("sum.txt")
