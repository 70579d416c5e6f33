"""What a look at a directory may conclude."""

import pytest

from snakemake_executor_plugin_mantik.engine.compare import find_empty
from tests.support import virtualtime
from tests.support.simulated import Fault, SimulatedSite, World


@pytest.mark.parametrize("wrong", ["empty", "not found"])
def test_a_directory_is_empty_only_for_certain(wrong: Fault) -> None:
    """It is removed then, with what is in it."""
    world = World()
    world.make_directory("out/a/b")
    world.write("kept/file", b"x")
    site = SimulatedSite(world)
    answers: list[Fault] = [wrong]
    site.fault = lambda _, about: answers.pop() if about == "kept" and answers else ""

    found = virtualtime.run(find_empty(site, ["out", "kept", "out/a", "out/a/b", "gone"]))

    assert found == ["out/a/b", "out/a", "out"]
