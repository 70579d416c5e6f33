"""Directories with more entries than a server returns in one answer."""

from pathlib import Path

import pytest

from hpc_sandbox import files
from snakemake_executor_plugin_mantik.sites.base import Site, SiteFacts
from tests.support.benches import Bench


@pytest.mark.parametrize("number", [149, 150, 151, 320])
def test_a_limit_below_the_one_that_is_asked_for(
    sandbox_bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The server says nothing of the entries that it leaves out."""
    monkeypatch.setattr(files, "_MAX_ENTRIES", 150)

    async def scenario(site: Site, facts: SiteFacts) -> None:
        names = {f"{n}" for n in range(number)}
        await site.make_directory("many")
        for name in names:
            (Path(facts.workspace) / "many" / name).touch()
        assert set(await site.list("many")) == names
        assert set(await site.list("many")) == names

    sandbox_bench.run_opened(scenario)
