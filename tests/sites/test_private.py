"""A file with secrets is closed to others, wherever the server can do that."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.sites.base import Site, SiteFacts
from tests.support.benches import Bench


@pytest.mark.parametrize("name", ["sandbox_bench", "sandbox_firecrest_bench"])
def test_private(request: pytest.FixtureRequest, name: str) -> None:
    bench: Bench = request.getfixturevalue(name)

    async def scenario(site: Site, facts: SiteFacts) -> None:
        for content in (b"export A=1", b"export B=2"):
            await site.put("work/secrets", content, private=True)
            file = Path(facts.workspace) / "work" / "secrets"
            assert file.stat().st_mode & 0o777 == 0o600
            assert file.read_bytes() == content

    bench.run_opened(scenario)
