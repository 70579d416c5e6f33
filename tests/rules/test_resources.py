"""Which site a rule's resources name."""

import pytest

from snakemake_executor_plugin_mantik.errors import UserError
from snakemake_executor_plugin_mantik.rules.resources import site_of


def test_the_site_is_taken_out_of_the_resources() -> None:
    resources: dict[str, object] = {"mantik_site": "b", "site": "x", "mantik": 1, "nodes": 2}
    assert site_of(resources, {"a": 1, "b": 2}) == "b"
    assert resources == {"site": "x", "mantik": 1, "nodes": 2}
    assert site_of(resources, {"a": 1, "b": 2}) == "a"


@pytest.mark.parametrize(
    ("wanted", "known"), [("HPC2", "hpc2"), ("hcp2", "hpc2"), ("juwels", "JUWELS")]
)
def test_a_site_of_nearly_the_name_is_suggested(wanted: str, known: str) -> None:
    with pytest.raises(UserError, match=rf"'{wanted}' \(did you mean {known}\?\)"):
        site_of({"mantik_site": wanted}, {"first": 1, known: 2})


@pytest.mark.parametrize(
    "name",
    ["mantiksite", "mantik-site", "mantik_sites", "Mantik_Site", "mantik_sit", "mantk_site"],
)
def test_a_misspelt_resource_is_no_other_site(name: str) -> None:
    with pytest.raises(UserError, match=rf"no resource {name} \(did you mean mantik_site\?\)"):
        site_of({name: "b"}, {"a": 1, "b": 2})
