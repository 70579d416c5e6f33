"""Rates of transfers that are under way."""

import pytest

from snakemake_executor_plugin_mantik.engine.transfer_meter import (
    Direction,
    TransferMeter,
    TransferView,
)


def test_a_rate_is_that_of_late_and_an_end_removes_the_transfer() -> None:
    now = 0.0
    meter = TransferMeter(lambda: now)
    with meter.measure(Direction.DOWNLOAD, "hpc", "a.bin", 5000, moved=1000) as transfer:
        # What an earlier attempt has brought is no rate.
        assert meter.views() == [TransferView(Direction.DOWNLOAD, "hpc", "a.bin", 5000, 1000, None)]
        for second in range(1, 31):
            now = float(second)
            transfer.arrived(1000 + (100 * second if second <= 10 else 1000 + 10 * second))
        [view] = meter.views()
        assert view.rate == pytest.approx(10, rel=0.2)
        now = 60.0  # it stalls
        [view] = meter.views()
        assert view.rate is not None
        assert view.rate < 5
    assert meter.views() == []
