"""What lies at a place, as the catalog of remote outputs asks for it."""

from contextlib import closing
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteUnreachable
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.engine.compare import Looks
from snakemake_executor_plugin_mantik.engine.place import make_retry
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.storage import access as access_module
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

    async def reach(place: str) -> Looks:
        return Looks(site, place, make_retry(site, print))

    with closing(Access(tmp_path, print)) as access:
        monkeypatch.setattr(access, "_reach", reach)

        assert [*access.list("place", "results")] == ["model"] * there


def test_a_place_is_reached_by_any_of_its_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "site.yaml"
    config.write_text("")
    journal = Journal(tmp_path / STATE)
    for name in ("aaa", "other", "zzz"):
        there = "elsewhere" if name == "other" else "place"
        journal.set_site(name, "url", "/ws", there, str(config))
    journal.close()
    world = World()
    world.write("results/model", b"x")
    tried: list[str] = []

    async def opened(name: str, *_: object, **__: object) -> SimulatedSite:
        tried.append(name)
        if name == "aaa":
            raise SiteUnreachable("the site has not answered", where=f"site {name}")
        return SimulatedSite(world)

    monkeypatch.setattr(access_module, "find_config", lambda record, name: name)
    monkeypatch.setattr(access_module, "open_site_again", opened)
    with closing(Access(tmp_path, print)) as access:
        assert [*access.list("place", "results")] == ["model"]
    assert tried == ["aaa", "zzz"]
