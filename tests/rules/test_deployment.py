"""What a rule's own environment means, where no job is needed to tell."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake.deployment.conda import CondaEnvFileSpec, Env
from snakemake.deployment.singularity import Image
from snakemake.sourcecache import LocalSourceFile, SourceCache
from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.rules.context import Payload, RuleContext
from snakemake_executor_plugin_mantik.rules.deployment import deployment_files, wrap_deployment
from snakemake_executor_plugin_mantik.rules.onsite.nested_snakemake import one_at_a_time
from snakemake_executor_plugin_mantik.rules.site_job import SiteJob, nested_options, parse_methods
from tests.support.trial import NASTY, wait_until


def test_the_words_of_the_setting() -> None:
    methods = parse_methods(["env-modules", "conda"])
    assert methods == {DeploymentMethod.CONDA, DeploymentMethod.ENV_MODULES}
    assert nested_options(methods) == ["--software-deployment-method", "conda", "env-modules"]
    assert nested_options(parse_methods([])) == []
    with pytest.raises(UserError, match="'mamba'"):
        parse_methods(["conda", "mamba"])


@pytest.fixture
def job(tmp_path: Path) -> SimpleNamespace:
    """What is read of a Snakemake job, with an environment file and what lies beside it."""
    folder = tmp_path / NASTY
    folder.mkdir()
    (folder / "e.yaml").write_text("dependencies: [x]")
    (folder / "e.post-deploy.sh").write_text("#!/usr/bin/env bash\necho ü")
    workflow = SimpleNamespace(
        sourcecache=SourceCache(tmp_path / "cache", tmp_path / "runtime"),
        deployment_settings=SimpleNamespace(apptainer_args=""),
        persistence=SimpleNamespace(conda_env_path="/c", container_img_path="/i"),
        runtime_paths=[],
    )
    rule = SimpleNamespace(
        name="r", params=None, env_modules=None, workflow=workflow, resources={},
        ruleinfo=SimpleNamespace(container_img=None),
    )  # fmt: skip
    spec = CondaEnvFileSpec(LocalSourceFile(str(folder / "e.yaml")))
    return SimpleNamespace(
        rule=rule,
        conda_env_spec=spec,
        container_img_url=None,
        is_containerized=False,
        resources={},
        folder=folder,
    )


def payload(job: Any, *methods: DeploymentMethod, command: str = "echo") -> Payload:
    config: Any = SimpleNamespace(
        config=SimpleNamespace(
            all_environments={"": SimpleNamespace(apptainer=None)},
            site=SimpleNamespace(expand=False),
        )
    )
    context = RuleContext({"site": config}, job.folder, frozenset(methods))
    return wrap_deployment(Payload(command, "zsh"), SiteJob(job, context))


def test_another_environment_for_each_content(job: SimpleNamespace) -> None:
    def places() -> tuple[str, ...]:
        made = payload(job, DeploymentMethod.CONDA)
        assert made.own_environment
        assert made.command.endswith("exec zsh -c echo")
        place = made.command.split("/e.yaml' ")[-1].split()[0]
        return (place, *(upload.path for upload in made.uploads))

    first = places()
    assert places() == first
    assert len(first) == 3
    (job.folder / "e.linux-aarch64.pin.txt").write_text("@EXPLICIT")
    job.rule.workflow.sourcecache = SourceCache(job.folder / "c2", job.folder / "r2")
    pinned = places()
    assert pinned[0] != first[0]
    assert len(pinned) == 4
    (job.folder / "e.post-deploy.sh").write_text("echo other")
    job.rule.workflow.sourcecache = SourceCache(job.folder / "c3", job.folder / "r3")
    assert places()[0] not in (first[0], pinned[0])


def test_what_is_not_wanted_changes_nothing(job: SimpleNamespace) -> None:
    assert payload(job, DeploymentMethod.APPTAINER) == Payload("echo", "zsh")


def test_a_command_that_is_no_word_goes_as_a_file(job: SimpleNamespace) -> None:
    job.container_img_url = "docker://x"
    long = "# " + "x" * 200_000 + "\necho"
    made = payload(job, DeploymentMethod.APPTAINER, command=long)
    [upload] = made.uploads
    assert upload.content == f"{long}\n".encode()
    assert f" zsh {upload.path}\n" in made.command
    assert len(made.command) < 20_000


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # Snakemake leaves them open
def test_an_environment_in_an_image_is_where_snakemake_has_put_it(job: SimpleNamespace) -> None:
    (job.folder / "e.linux-64.pin.txt").write_text("@EXPLICIT")
    job.container_img_url, job.is_containerized = "docker://x", True
    made = payload(job, DeploymentMethod.CONDA, DeploymentMethod.APPTAINER)
    dag = SimpleNamespace(workflow=job.rule.workflow)
    image = Image("docker://x", dag, is_containerized=True)
    env = Env(job.rule.workflow, env_file=job.conda_env_spec.file, container_img=image)
    env._conda = SimpleNamespace(platform="linux-64")  # it would ask this machine's
    assert env.address in made.command
    assert env.address.startswith("/conda-envs/")
    assert "_m_create" not in made.command


def test_what_a_nested_snakemake_takes_along(job: SimpleNamespace) -> None:
    job.container_img_url = str(job.folder / "e.yaml")
    every = RuleContext({}, job.folder, frozenset(DeploymentMethod))
    project_files, image = deployment_files(SiteJob(job, every))
    assert [Path(source.path).name for source in project_files] == ["e.yaml", "e.post-deploy.sh"]
    assert image == job.folder / "e.yaml"
    assert deployment_files(SiteJob(job, RuleContext({}, job.folder))) == ([], None)


def test_nested_snakemakes_make_environments_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".snakemake").mkdir()
    go, running, most = threading.Event(), [0], [0]

    def make() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        go.wait(600)
        running[0] -= 1

    threads = [threading.Thread(target=one_at_a_time(make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: running[0])
    go.set()
    for thread in threads:
        thread.join(600)
    assert most == [1]
