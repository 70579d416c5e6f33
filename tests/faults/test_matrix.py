"""Fault by step by API: no job lost, doubled or misreported."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.cell import cell
from tests.faults.faults import FAULTS, Fault
from tests.faults.steps import STEPS
from tests.support.proxy import Rule
from tests.support.workflows import until

APIS = ("unicore", "firecrest")
NETWORK_STEPS = ("stage", "submit", "fetch")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("step", NETWORK_STEPS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(
    fault: Fault, step: str, api: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with cell(api, tmp_path) as here:
        here.open_gate()
        rule = here.proxy.add(Rule(fault.name, STEPS[step], fault.act(api), fault.times))
        ran = here.end(here.start())
        count = here.count(ran)
        record_property("count", (count.jobs, count.lost, count.doubled, count.misreported))
        assert not count.wrong, f"{count.wrong}\n{here.proxy.counted()}\n{ran.output}"
        assert rule.taken, f"nothing met the fault: {here.proxy.counted()}"
