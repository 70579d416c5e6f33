"""What a backend config means for a job: its values as values of `jobs.spec`.

Nothing is read or asked; only links on the way to a local image are followed.
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
"""`srun` of Slurm 22.05 and later takes the CPUs of a task from here, not from the job."""


def job_environment(
    config: BackendConfig, project: Path, cpus_per_task: int | None = None
) -> Environment:
    """The environment that a job of this site runs in.

    Args:
        config: the site's config.
        project: the project folder, that local images are relative to.
        cpus_per_task: the CPUs of a task where a rule asks for others than the config does;
            `SRUN_CPUS_PER_TASK` follows it unless it is set in the config's Variables.
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
    """What a job of this site asks for, unless its rule says otherwise.

    One task per node with `CPUsPerNode` CPUs, so that `srun` starts a command once on each node.
    `TotalCPUs` and `CPUsPerNode` together tell the nodes, where `Nodes` does not.
    """
    asked = config.resources
    nodes = asked.nodes
    if nodes is None and asked.total_cpus and asked.cpus_per_node:
        nodes = asked.total_cpus // asked.cpus_per_node
    return Resources(
        queue=asked.queue,
        runtime_s=asked.runtime_s,
        nodes=nodes,
        cpus_per_task=asked.cpus_per_node,
        total_cpus=asked.total_cpus,
        gpus_per_node=asked.gpus_per_node,
        memory_mib_per_node=asked.memory_mib_per_node,
        reservation=asked.reservation,
        constraint=asked.node_constraints,
        qos=asked.qos,
    )


def script_limits(config: BackendConfig) -> ScriptLimits:
    """Sizes and times that the site's job scripts keep to."""
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
    """The local image that the site's jobs need: its path here, and its path in the workspace.

    None without an image, or if it is at the site already.
    """
    apptainer = config.environment.apptainer
    if apptainer is None or apptainer.type == "remote":
        return None
    return project / apptainer.path, _image_path(config, project)


def _image_path(config: BackendConfig, project: Path) -> str:
    """The image's path, absolute at the site or relative to the workspace."""
    apptainer = config.environment.apptainer
    assert apptainer is not None
    if apptainer.type == "remote":
        return apptainer.path
    return image_path(apptainer.path, project)


def image_path(path: str, project: Path) -> str:
    """The path in the workspace of an image that is here.

    One outside of the project folder has no place of its own in the workspace, which mirrors that
    folder. It is put where two images of the same name do not meet.
    """
    path = posixpath.normpath(path)
    inside = path if _stays(path) else _in_project(path, project)
    if inside is not None:
        return inside
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    return f"{IMAGES}/{digest}/{PurePosixPath(path).name}"


def _in_project(path: str, project: Path) -> str | None:
    """The path in the project folder of an image given by a detour; None: it lies elsewhere.

    The path is compared as it is written, then with the links on its way followed. An image that
    is a link itself lies where the link does.
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
    """Whether a normal path stays in the folder that it is relative to."""
    return path != ".." and not path.startswith(("/", "../"))


def _python(path: str | None) -> str | None:
    return None if path is None else posixpath.normpath(path)
