"""Fixtures that several rooms' tests share."""

import signal
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings

from tests.support.keeper import killed_with_this_process

# A shell has what it starts in the background ignore Ctrl-C, and so all that is started from there.
signal.signal(signal.SIGINT, signal.default_int_handler)
# However long an example may take on a busy machine, nothing follows from that.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

WAITING = {"e2e", "golden", "workflows"}
"""Folders of tests that run the real `snakemake`."""

pytest_plugins = [
    "tests.support.sandbox",
    "tests.support.unicorex",
    "tests.support.benches",
    "tests.support.parrot",
    "tests.support.places",
    "tests.support.s3",
    "tests.support.trial",
    "tests.real.centre.fixtures",
    "tests.real.software",
]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each worker begin with its share of the tests that mostly wait, or few do them last.

    `--dist worksteal` gives each worker as many of the items as others, in a row.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    waiting = [item for item in items if WAITING & set(item.path.parts)]
    others = [item for item in items if not WAITING & set(item.path.parts)]
    bounds = [len(others) * worker // workers for worker in range(workers + 1)]
    items[:] = [
        item
        for worker, (first, last) in enumerate(pairwise(bounds))
        for item in (*waiting[worker::workers], *others[first:last])
    ]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _nothing_outlives_its_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with killed_with_this_process(tmp_path_factory.getbasetemp()):
        yield
