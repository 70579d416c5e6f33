"""Convert a backend config to values of `jobs.spec`.

No I/O, except that links on the path of a local image are followed.
"""

import hashlib
import os
import posixpath
from pathlib import Path, PurePosixPath
from typing import Final

from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.jobs.paths import IMAGES
from snakemake_executor_plugin_mantik.jobs.spec import (
    Apptainer,
    Environment,
    Resources,
    ScriptLimits,
)

_SRUN_CPUS: Final = "SRUN_CPUS_PER_TASK"
"""`srun` of Slurm 22.05 and later reads the CPUs of a task from this variable, not from the job."""


def job_environment(
    config: BackendConfig, project: Path, cpus_per_task: int | None = None
) -> Environment:
    """Return the environment of a job of this site.

    Args:
        config: the site's config.
        project: the project folder, which paths of local images are relative to.
        cpus_per_task: the CPUs of a task, if a rule overrides those of the config;
            `SRUN_CPUS_PER_TASK` gets this value unless the config's Variables set it.
    """
    environment = config.environment
    cpus = cpus_per_task if cpus_per_task is not None else config.resources.cpus_per_node
    variables = {_SRUN_CPUS: str(cpus)} if cpus is not None else {}
    apptainer = None
    if environment.apptainer:
        apptainer = Apptainer(
            image=_image_path(config, project), options=environment.apptainer.options
        )
    return Environment(
        apptainer=apptainer,
        python=_python(environment.python),
        modules=environment.modules,
        variables={**variables, **environment.variables},
        before_on_login=environment.before_on_login,
        before_on_compute=environment.before_on_compute,
        after_on_compute=environment.after_on_compute,
        after_on_login=environment.after_on_login,
    )


def job_resources(config: BackendConfig) -> Resources:
    """Return the resources that a job of this site requests, unless its rule overrides them.

    Each node gets one task with `CPUsPerNode` CPUs, so that `srun` starts a command once per node.
    Without `Nodes`, their number is `TotalCPUs` divided by `CPUsPerNode`.
    """
    given = config.resources
    nodes = given.nodes
    if nodes is None and given.total_cpus and given.cpus_per_node:
        nodes = given.total_cpus // given.cpus_per_node
    return Resources(
        queue=given.queue,
        runtime_s=given.runtime_s,
        nodes=nodes,
        cpus_per_task=given.cpus_per_node,
        total_cpus=given.total_cpus,
        gpus_per_node=given.gpus_per_node,
        memory_mib_per_node=given.memory_mib_per_node,
        reservation=given.reservation,
        constraint=given.node_constraints,
        qos=given.qos,
    )


def script_limits(config: BackendConfig) -> ScriptLimits:
    """Return the limits of the site's job scripts."""
    site = config.site
    return ScriptLimits(
        heartbeat_s=site.heartbeat_s,
        grace_s=site.term_grace_s,
        marker_bytes=site.marker_limit_bytes,
        archive_file_bytes=site.archive_file_limit_bytes,
        log_tail_bytes=site.log_tail_bytes,
        live_s=site.live_s,
        live_file_bytes=site.live_file_limit_bytes,
        live_bytes=site.live_limit_bytes,
    )


def image_upload(config: BackendConfig, project: Path) -> tuple[Path, str] | None:
    """Return the image to upload: its path on this machine, and its path in the workspace.

    None if there is no image, or if it is at the site already or has a URL (`Type: remote`).
    """
    apptainer = config.environment.apptainer
    if apptainer is None or apptainer.type == "remote":
        return None
    return project / apptainer.path, _image_path(config, project)


def _image_path(config: BackendConfig, project: Path) -> str:
    """Return the image's path, absolute at the site or relative to the workspace, or its URL."""
    apptainer = config.environment.apptainer
    assert apptainer is not None
    if apptainer.type == "remote":
        return apptainer.path
    return image_path(apptainer.path, project)


def image_path(path: str, project: Path) -> str:
    """Return the path in the workspace of a local image.

    The workspace mirrors the project folder, so an image outside it gets a directory of its own,
    where two images of the same name do not collide.
    """
    path = posixpath.normpath(path)
    inside = path if _stays(path) else _in_project(path, project)
    if inside is not None:
        return inside
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    return f"{IMAGES}/{digest}/{PurePosixPath(path).name}"


def _in_project(path: str, project: Path) -> str | None:
    """Return the path in the project folder of an image given by a detour; None if outside it.

    The path is compared first as written, then with links in its directories resolved. An image
    that is itself a link counts as lying where the link is.
    """
    folder = os.path.abspath(project)
    whole = os.path.join(folder, path)
    real = os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))
    for image, top in ((os.path.normpath(whole), folder), (real, os.path.realpath(folder))):
        relative = os.path.relpath(image, top)
        if _stays(relative):
            return relative
    return None


def _stays(path: str) -> bool:
    """Return whether a normalised path stays in the folder that it is relative to."""
    return path != ".." and not path.startswith(("/", "../"))


def _python(path: str | None) -> str | None:
    return None if path is None else posixpath.normpath(path)
