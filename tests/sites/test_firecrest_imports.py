"""What a firecREST site fetches from another server, before anything is sent."""

from typing import Any, cast

import pytest

from snakemake_executor_plugin_mantik.sites.base import SharedFile
from snakemake_executor_plugin_mantik.sites.firecrest.site import FirecrestImports
from tests.support import virtualtime

NOTHING = cast(Any, None)


@pytest.mark.parametrize(
    "shared",
    [
        SharedFile('https://store/file"\noutput = "/home/me/.bashrc'),
        SharedFile("https://store/file?a=b\r\nproxy = https://elsewhere"),
        SharedFile("https://store/a file"),
        SharedFile("file:///etc/passwd"),
        SharedFile("https://unicore/rest/core/storages/WORK/files/x", "unicore"),
    ],
)
def test_an_address_that_is_more_than_one_option_of_curl_is_not_used(shared: SharedFile) -> None:
    imports = FirecrestImports(NOTHING, NOTHING, NOTHING, NOTHING, None)
    assert virtualtime.run(imports.start(shared, "bundle/imported/1")) is None
