"""Storage plugins: this machine fetches and stores, the site sees files and no credentials."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from snakemake.common import tests as official

from snakemake_executor_plugin_mantik import ExecutorSettings
from tests.e2e.test_secrets import leaks
from tests.support.s3 import S3
from tests.support.workflows import Place, Project, tells

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a run in this process leaves a handler for."""


class Stored(official.TestWorkflowsMinioPlayStorageBase):
    """Snakemake's own tests of an executor with a storage, as they come."""

    @pytest.fixture(autouse=True)
    def _around(
        self, s3: S3, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        self._s3 = s3
        self._config = tmp_path / f"{place.name}.yaml"
        self._config.write_text(place.config)
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        handlers = {number: signal.getsignal(number) for number in _HANDLED}
        yield
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def get_executor(self) -> str:
        return "mantik"

    def get_executor_settings(self) -> ExecutorSettings:
        return ExecutorSettings(backend_config=[str(self._config)], track="none")

    @property
    def endpoint_url(self) -> str:
        return self._s3.url


class TestUnicore(Stored):
    __test__ = True

    @pytest.fixture
    def place(self, sandbox_place: Place) -> Place:
        return sandbox_place


class TestFirecrest(Stored):
    __test__ = True

    @pytest.fixture
    def place(self, firecrest_place: Place) -> Place:
        return firecrest_place


def test_s3(s3: S3, either: Project) -> None:
    client = s3.client()
    client.create_bucket(Bucket=either.place.name)
    client.put_object(Bucket=either.place.name, Key="in/a b.txt", Body=b"stored\n")
    either.extra |= s3.environment
    either.write(
        "Snakefile",
        f"""
        rule all:
            input: storage("s3://{either.place.name}/out/final.txt")

        rule first:
            input: storage("s3://{either.place.name}/in/a b.txt")
            output: storage("s3://{either.place.name}/out/first.txt")
            shell: "cat {{input:q}} > {{output}}; env >> env.txt"

        rule final:
            input: rules.first.output
            output: storage("s3://{either.place.name}/out/final.txt")
            shell: "cat {{input}} {{input}} > {{output}}"
        """,
    )

    said = either.run().ok().output

    stored = client.get_object(Bucket=either.place.name, Key="out/final.txt")["Body"].read()
    assert stored == b"stored\nstored\n"
    assert leaks(either.place.server, words=(s3.secret_key,)) == []
    assert s3.secret_key not in said
    either.write(
        "Snakefile", either.read("Snakefile").replace("cat {input} {input}", "cat {input}")
    )
    either.run().ok()
    stored = client.get_object(Bucket=either.place.name, Key="out/final.txt")["Body"].read()
    assert stored == b"stored\n"


def test_without_a_shared_file_system(project: Project) -> None:
    project.write("Snakefile", 'rule a:\n    output: "a"\n    shell: "touch {output}"\n')
    storage = ["--default-storage-provider", "fs", "--default-storage-prefix", "store"]

    said = project.run("--shared-fs-usage", "none", *storage).failed()
    tells(said, "--shared-fs-usage", "input-output, persistence, storage-local-copies")

    said = project.run("--shared-fs-usage", "input-output", "persistence", "sources").failed()
    tells(said, "storage-local-copies")
