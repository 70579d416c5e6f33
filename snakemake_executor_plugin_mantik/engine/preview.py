"""Preview the submission of a command, without contacting a site.

Spec, script and submission come from the same functions as in a run. Values that only a run knows
have placeholders: the try's UUID, the workspace's path if it is not configured, the names of
bundles.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from snakemake_executor_plugin_mantik.config.environment_keys import EnvironmentConfig
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.jobs.paths import workspace_below
from snakemake_executor_plugin_mantik.jobs.resources import cpus_per_node
from snakemake_executor_plugin_mantik.jobs.spec import InputFile, JobSpec
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState
from snakemake_executor_plugin_mantik.sites.base import SiteFacts, Submission
from snakemake_executor_plugin_mantik.sites.firecrest.script import submission_body
from snakemake_executor_plugin_mantik.sites.unicore.description import (
    batch_directives,
    job_description,
)

from .plan import Planner
from .request import JobRequest
from .stage import Staged
from .submit import make_submission

TRY: Final = "00000000-0000-4000-8000-000000000000"
"""Placeholder for the UUID of a try."""

WORKSPACE: Final = "/WORKSPACE"
"""Placeholder for the workspace's path at the site."""


EnvironmentKind = Literal["apptainer", "containerengine", "pyxis", "uenv", "python", "none"]
"""The key of the backend config's environment, in lower case."""


@dataclass(frozen=True)
class Preview:
    """A preview of a submission; the fields are the keys of `smk-mantik render --json`.

    Attributes:
        resources: the requested resources, normalised.
        environment: what the command runs in.
        image_type: where the image is; None without one.
        variables: the variables that are set for the command, as its process sees them.
        submission: UNICORE's job description, or the body of firecREST's `POST …/jobs`.
        script: the job script, with the scheduler's directives, if any, after its first line.
        uploads: files to upload, as paths in the workspace, which mirrors the project folder.
        warnings: settings that are allowed but probably unintended.
    """

    site: str
    api: Literal["unicore", "firecrest"]
    resources: Mapping[str, str | int | None]
    environment: EnvironmentKind
    image_type: Literal["local", "remote"] | None
    variables: Mapping[str, str]
    submission: Mapping[str, Any]
    script: str
    uploads: tuple[str, ...]
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return asdict(self)


def make_preview(
    planner: Planner,
    site: str,
    command: str,
    *,
    environment: str = "",
    uploads: Collection[str] = (),
    image_size: int | None = None,
    warnings: Collection[str] = (),
    unicore_version: str = "",
) -> Preview:
    """Return the preview for a rule that has only a command.

    `environment` is the name of the config's environment; empty for its default. `uploads` are the
    sources that would be uploaded, and `image_size` is the size of the local
    image in bytes, if one is in use. `unicore_version` is that of the server, where known.

    Raises:
        UserError: something cannot be submitted.
        SiteRejected: the site's API cannot express it.
    """
    config = planner.config
    spec = _spec(planner, site, command, environment, image_size)
    submission, script = _submission(config, make_submission(spec), spec.workspace, unicore_version)
    of_config = config.named_environment(environment)
    files = [path for _, path in planner.environment_files(environment)]
    return Preview(
        site=site,
        api=config.api,
        resources=_resources(spec),
        environment=_environment(of_config),
        image_type=of_config.apptainer.type if of_config.apptainer else None,
        variables={**spec.variables, **spec.environment.variables},
        submission=submission,
        script=script,
        uploads=tuple(sorted({*uploads, *files})),
        warnings=tuple(warnings),
    )


def _spec(
    planner: Planner, site: str, command: str, environment: str, image_size: int | None
) -> JobSpec:
    name = "render"
    request = JobRequest(  # noqa: S604 - the shell of the job
        number=0, job=name, rule=name, name=name, site=site, command=command,
        shell="bash",
        resources={}, threads=1, variables={}, inputs=(), outputs=(), environment=environment,
    )  # fmt: skip
    record = TryRecord(
        id=TRY, site=site, bucket=0, job=name, rule=name, name=name, fingerprint="",
        state=TryState.PLANNED,
    )  # fmt: skip
    files = planner.environment_files(environment)
    inputs = tuple(
        InputFile(path, image_size if number == 0 else None)
        for number, (_, path) in enumerate(files)
    )
    configured = planner.config.site.workspace or ""
    workspace = workspace_below(configured) if configured.startswith("/") else WORKSPACE
    facts = SiteFacts(workspace, server="")
    spec = planner.spec(request, record, facts, Staged((), b"", (), inputs))
    return replace(spec, identity="")  # no job that a journal knows


def _resources(spec: JobSpec) -> dict[str, str | int | None]:
    resources = spec.resources
    return {
        "queue": resources.queue,
        "runtime_s": resources.runtime_s,
        "nodes": resources.nodes,
        "total_cpus": resources.total_cpus,
        "cpus_per_node": cpus_per_node(resources),
        "gpus_per_node": resources.gpus_per_node,
        "memory_mib_per_node": resources.memory_mib_per_node,
        "reservation": resources.reservation,
        "node_constraints": resources.constraint,
        "qos": resources.qos,
    }


def _environment(environment: EnvironmentConfig) -> EnvironmentKind:
    kinds: Mapping[EnvironmentKind, object] = {
        "apptainer": environment.apptainer,
        "containerengine": environment.container_engine,
        "pyxis": environment.pyxis,
        "uenv": environment.uenv,
        "python": environment.python,
    }
    return next((kind for kind, given in kinds.items() if given is not None), "none")


def _submission(
    config: BackendConfig, submission: Submission, workspace: str, unicore_version: str
) -> tuple[dict[str, Any], str]:
    """Return the submission, and the script with the scheduler's directives after its first line.

    UNICORE gets a batch file that begins with the directives and writes the script, or the script
    alone without a scheduler; firecREST gets both in one.
    """
    scheduler = config.site.scheduler
    if config.api == "firecrest":
        body = submission_body(submission, "pbs" if scheduler == "pbs" else "slurm", workspace)
        return body, body["job"]["script"]
    description = job_description(submission, scheduler, None, unicore_version)
    if scheduler == "none":
        return description, submission.script
    head = "\n".join([*batch_directives(submission, scheduler), ""])
    return description, head + submission.script.partition("\n")[2]
