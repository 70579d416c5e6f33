"""What lies at a place, as the catalog of stored outputs asks for it."""

from contextlib import closing
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.storage.access import Access
from tests.support.simulated import Fault, SimulatedSite, World


@pytest.mark.parametrize("there", [True, False])
def test_not_found_is_believed_only_if_the_site_says_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """A server that starts denies all files; what is there must not be made again."""
    world = World()
    if there:
        world.write("results/model", b"x")
    site = SimulatedSite(world)
    denials: list[Fault] = ["not found"]
    answers = iter(denials)
    site.fault = lambda method, about: next(answers, "") if method == "list" else ""

    async def at(place: str) -> SimulatedSite:
        return site

    with closing(Access(tmp_path, {}, print)) as access:
        monkeypatch.setattr(access, "_at", at)

        assert [*access.list("place", "results")] == ["model"] * there
