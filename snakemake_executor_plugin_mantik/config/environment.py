"""Convert a backend config to values of `jobs.spec`.

No I/O, except that links on the path of a local image are followed, and that local Environment
Definition Files and files of requirements are read.
"""

import hashlib
import os
import posixpath
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final

from ..common.errors import UserError, did_you_mean, find_alike
from ..jobs.paths import IMAGES
from ..jobs.pools import Pool
from ..jobs.quoting import keep_literal
from ..jobs.spec import Apptainer, Container, Environment, Resources, ScriptLimits
from .environment_keys import EnvironmentConfig
from .known_sites import node_cores
from .model import BackendConfig, PoolConfig, ResourcesConfig
from .named_files import read_edf, read_requirements

_SRUN_CPUS: Final = "SRUN_CPUS_PER_TASK"
"""`srun` of Slurm 22.05 and later reads the CPUs of a task from this variable, not from the job."""


ENVIRONMENT_RESOURCE: Final = "mantik_environment"
"""Names one of the environments in the config of the rule's site. By default, `Environment`."""


def job_environment(
    config: BackendConfig, project: Path, cpus_per_task: int | None = None, name: str = ""
) -> Environment:
    """Return the environment of a job of this site.

    Args:
        config: the site's config.
        project: the project folder, which paths of local images are relative to.
        cpus_per_task: the CPUs of a task, if a rule overrides those of the config;
            `SRUN_CPUS_PER_TASK` gets this value unless the config's Variables set it.
        name: the name of the environment in the config; empty for `Environment`.
    """
    environment = config.all_environments[name]
    python = environment.python
    cpus = cpus_per_task if cpus_per_task is not None else config.resources.cpus_per_node
    variables = {_SRUN_CPUS: str(cpus)} if cpus is not None else {}
    apptainer = None
    if (given := environment.apptainer) is not None:
        image = given.path if given.type == "remote" else image_path(given.path, project)
        apptainer = Apptainer(_expandable(image, config), given.options)
    return Environment(
        apptainer=apptainer,
        python=_expandable(posixpath.normpath(python.path), config) if python else None,
        requirements=requirement_files(environment, project),
        modules=environment.modules,
        variables={**variables, **environment.variables},
        before_on_login=environment.before_on_login,
        before_on_compute=environment.before_on_compute,
        after_on_compute=environment.after_on_compute,
        after_on_login=environment.after_on_login,
        container=_container(environment, project),
        slurm_options=_slurm_options(environment),
        expand=config.site.expand,
    )


def _container(environment: EnvironmentConfig, project: Path) -> Container | None:
    engine, pyxis = environment.container_engine, environment.pyxis
    if engine is not None:
        source = engine.name or _workspace_path(str(engine.file), project)
        return Container(
            "ContainerEngine", source, is_file=engine.name is None, options=engine.options
        )
    if pyxis is not None:
        is_file = pyxis.image.startswith(("/", "./"))
        source = _workspace_path(pyxis.image, project) if is_file else pyxis.image
        return Container("Pyxis", source, is_file, pyxis.mounts, pyxis.options)
    return None


def _slurm_options(environment: EnvironmentConfig) -> tuple[str, ...]:
    uenv = environment.uenv
    if uenv is None:
        return ()
    view = [f"--view={','.join(uenv.view)}"] if uenv.view else []
    return (f"--uenv={','.join(uenv.image)}", *view)


def _workspace_path(path: str, project: Path) -> str:
    """Return a path at the site as it is, and the path in the workspace of a local one."""
    return path if path.startswith("/") else image_path(path, project)


def unknown_environment(name: str, config: BackendConfig, where: str) -> UserError:
    """Return the error for an environment that a config does not have."""
    known = list(config.environments)
    likely = did_you_mean(find_alike(name, known))
    has = f"the config has {', '.join(known)}" if known else "the config has no Environments"
    return UserError(
        f"there is no environment {name!r}{likely}; {has}",
        where=where,
        do="Correct the name, or add it to Environments in the backend config",
    )


def find_pool(config: BackendConfig, name: str, account: str | None) -> Pool:
    """Return the site's pool of that name, whose allocations `account` pays for."""
    given = config.pools[name]
    return Pool(
        name, replace(_resources(given), account=account), given.idle_s, given.count,
        config.site.term_grace_s, given.takes_s, node_cores(config, given.queue),
    )  # fmt: skip


def find_pools(config: BackendConfig, account: str | None) -> list[Pool]:
    """Return the site's pools."""
    return [find_pool(config, name, account) for name in config.pools]


def job_resources(config: BackendConfig) -> Resources:
    """Return the resources that a job of this site requests, unless its rule overrides them.

    Each node gets one task with `CPUsPerNode` CPUs, so that `srun` starts a command once per node.
    Without `Nodes`, their number is `TotalCPUs` divided by `CPUsPerNode`.
    """
    given = config.resources
    nodes = given.nodes
    if nodes is None and given.total_cpus and given.cpus_per_node:
        nodes = given.total_cpus // given.cpus_per_node
    return replace(_resources(given), nodes=nodes, total_cpus=given.total_cpus)


def _resources(given: ResourcesConfig | PoolConfig) -> Resources:
    return Resources(
        queue=given.queue, runtime_s=given.runtime_s, nodes=given.nodes,
        cpus_per_task=given.cpus_per_node, gpus_per_node=given.gpus_per_node,
        memory_mib_per_node=given.memory_mib_per_node, reservation=given.reservation,
        constraint=given.node_constraints, qos=given.qos,
    )  # fmt: skip


def script_limits(config: BackendConfig) -> ScriptLimits:
    """Return the limits of the site's job scripts."""
    return replace(config.site.timing.script, grace_s=config.site.term_grace_s)


def image_upload(environment: EnvironmentConfig, project: Path) -> tuple[Path, str] | None:
    """Return the local Apptainer image: its path on this machine, and its path in the workspace.

    None if there is no image, or if it is at the site already or has a URL (`Type: remote`).
    """
    apptainer = environment.apptainer
    if apptainer is None or apptainer.type == "remote":
        return None
    return project / apptainer.path, image_path(apptainer.path, project)


def environment_uploads(
    environment: EnvironmentConfig, project: Path
) -> tuple[tuple[Path, str], ...]:
    """Return the files of an environment to upload: paths on this machine and in the workspace.

    Raises:
        UserError: a local Environment Definition File, or a file of requirements, is invalid.
    """
    if (image := image_upload(environment, project)) is not None:
        return (image,)
    paths: list[str] = []
    if (edf := local_edf(environment)) is not None:
        paths = [edf, *read_edf(edf, project).files]
    elif environment.pyxis is not None and environment.pyxis.image.startswith("./"):
        paths = [environment.pyxis.image]
    paths += requirement_files(environment, project)
    return tuple((project / path, image_path(path, project)) for path in paths)


def requirement_files(environment: EnvironmentConfig, project: Path) -> tuple[str, ...]:
    """Return the files of which the virtual environment is made; none if it lies at the site.

    Raises:
        UserError: the file of requirements is invalid.
    """
    python = environment.python
    if python is None or python.requirements is None:
        return ()
    return read_requirements(python.requirements, project).files


def local_edf(environment: EnvironmentConfig) -> str | None:
    """Return the path of the Environment Definition File if it lies here, as written."""
    engine = environment.container_engine
    path = engine.file if engine is not None else None
    return None if path is None or path.startswith("/") else path


def _expandable(path: str, config: BackendConfig) -> str:
    """Return a path of which bash expands what lies at the site only, if it expands anything."""
    local = not path.startswith(("/", "$")) and "://" not in path
    return keep_literal(path) if config.site.expand and local else path


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


def describe_software(environment: EnvironmentConfig) -> Iterator[str]:
    """Yield what an environment consists of: `Apptainer env/train.sif`."""
    if environment.apptainer:
        yield f"Apptainer {environment.apptainer.path}"
    if environment.container_engine:
        engine = environment.container_engine
        yield f"ContainerEngine {engine.name or engine.file}"
    if environment.pyxis:
        yield f"Pyxis {environment.pyxis.image}"
    if environment.uenv:
        yield f"Uenv {','.join(environment.uenv.image)}"
    if environment.python:
        yield f"Python {environment.python.path}"
