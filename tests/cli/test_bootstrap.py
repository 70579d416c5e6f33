"""`smk-mantik bootstrap`: what it makes of a site's answer and of pip's."""

from typing import Any

import pytest

from snakemake_executor_plugin_mantik.cli.bootstrap import platforms


@pytest.mark.parametrize(
    ("libc", "newest"), [(["glibc", "2.28"], 28), (["glibc", "2.17"], 17), (["", ""], 17)]
)
def test_wheels_for_the_c_library_of_a_site(libc: list[str], newest: int) -> None:
    there: dict[str, Any] = {"machine": "aarch64", "libc": libc, "python": "3.12.1"}
    tags = platforms(there)
    assert tags[0] == f"manylinux_2_{newest}_aarch64"
    assert "manylinux_2_17_aarch64" in tags
    assert tags[-1] == "linux_aarch64"
