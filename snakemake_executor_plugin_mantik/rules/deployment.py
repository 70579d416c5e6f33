"""Deploy a rule's own environment (`conda:`, `container:`, `envmodules:`) as far as requested.

Snakemake's `--software-deployment-method` acts on this machine. For sites there is
`--mantik-software-deployment` with the same values. As Snakemake does locally, nest modules in a
conda environment in a container, whichever of them the rule has.
"""

import hashlib
import os
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml
from snakemake.common import is_local_file, parse_uri
from snakemake.deployment.conda import CondaEnvDirSpec, CondaEnvFileSpec
from snakemake.shell import shell
from snakemake.sourcecache import SourceFile
from snakemake_interface_executor_plugins.settings import DeploymentMethod

from ..common.errors import UserError, did_you_mean
from ..config.environment import describe_software, image_path
from ..config.named_files import NamedFileError, follow_requirements, rebase_requirements
from ..engine.request import Upload
from ..jobs.deployment import (
    MACHINES,
    CondaFile,
    Image,
    wrap_conda,
    wrap_container,
    wrap_modules,
    wrap_venv,
)
from ..jobs.paths import file_path
from ..mlproject.entry import read_python_env
from ..mlproject.project import Project
from . import Job
from .context import Payload, start_words
from .site_job import ALL_METHODS, METHODS, OPTION, RuleEnvironment, SiteJob, read_own
from .units import find_products, list_members


def wrap_python_env(
    project: Project, command: str, *, rule: str
) -> tuple[str, tuple[Upload, ...], tuple[str, ...]]:
    """Return bash that runs the command in a project's `python_env`, and files that it needs.

    Raises:
        UserError: the file of the environment, or one that it names, cannot be used.
    """
    environment = project.environment
    assert environment is not None, "a project without an environment was asked for it"
    name, folder = environment.value, str(project.relative_folder())
    version, requirements = read_python_env(project.folder, name)
    text = "".join(f"{line}\n" for line in requirements)
    try:
        found = follow_requirements(text, posixpath.normpath(name), project.folder)
    except NamedFileError as error:
        raise NamedFileError(f"its python_env cannot be used: {error.what}") from None
    # The file that pip reads lies three levels below the workspace (`file_path`).
    base = posixpath.normpath(posixpath.join("../../..", folder, posixpath.dirname(name)))
    content = rebase_requirements(text, base).encode()
    upload = Upload(file_path(content, "requirements.txt"), content=content)
    inputs = tuple(posixpath.normpath(posixpath.join(folder, path)) for path in found.files)
    wrapped = wrap_venv(
        posixpath.normpath(posixpath.join(folder, name)),
        (upload.path, *inputs),
        command,
        rule=rule,
        folder=folder,
        version=".".join(version.split(".")[:2]),
    )
    return wrapped, (upload,), inputs


def _python_env_mistake(project: Project, workdir: Path) -> str | None:
    """Return why a project's environment cannot be made, as words after "rule NAME", or None."""
    environment = project.environment
    if environment is None or environment.key != "python_env":
        return None
    try:
        _, _, inputs = wrap_python_env(project, "", rule="")
    except UserError as error:
        return f"runs an entry point of {project.shown}, but {error.what}"
    outside = [path for path in inputs if not (workdir / path).is_file()]
    return f"needs {outside[0]} for {environment}, which does not exist" if outside else None


_BLOCKED = ("R_LIBS", "PYTHONPATH", "PERLLIB", "PERL5LIB")
"""Variables that Snakemake unsets for a command in a conda environment (snakemake/shell.py)."""

_SUFFIXES = [".yaml", ".yml"]

_IN_IMAGE = "/conda-envs"
"""Directory of conda environments in an image of `containerized:` (snakemake/deployment)."""


def wrap_deployment(payload: Payload, at: SiteJob) -> Payload:
    """Wrap the payload in the job's own environment.

    Raises:
        UserError: an environment file or image is not available.
    """
    own, rule = at.own, at.rule.name
    if own.modules or own.conda or (own.project is not None and not own.container):
        payload = _inside(payload)
    if own.modules:
        payload = payload.around(wrap_modules(own.modules, payload.command, rule=rule))
    if own.conda:
        environment, uploads = _conda(at.job, own)
        blocked = _BLOCKED if shell.conda_block_conflicting_envvars else ()
        text = wrap_conda(environment, payload.command, rule=rule, blocked=blocked)
        payload = payload.around(text, uploads)
    if own.project is not None and not own.conda and not own.container:
        payload = payload.around(*wrap_python_env(own.project, payload.command, rule=rule))
    if own.container:
        start, more = start_words(payload)
        image, uploads, inputs = _image(at, own.container)
        text = wrap_container(image, shlex.join(start), rule=rule)
        payload = payload.around(text, (*more, *uploads), inputs)
    return replace(payload, own_environment=True) if own else payload


def _inside(payload: Payload) -> Payload:
    """Turn the payload into text for bash, so that commands can precede it."""
    if payload.shell == "bash":
        return payload
    start, uploads = start_words(payload)
    return payload.around(f"exec {shlex.join(start)}", uploads)


def _conda(job: Job, own: RuleEnvironment) -> tuple[CondaFile | str, tuple[Upload, ...]]:
    """Return a job's conda environment, and the files to upload for it."""
    spec = own.conda
    if not isinstance(spec, CondaEnvFileSpec):
        return str(getattr(spec, "path", None) or spec.name), ()
    label = spec.file.get_path_or_uri(secret_free=True)
    if os.path.isabs(label) and Path(label).is_relative_to(Path.cwd()):
        label = str(Path(label).relative_to(Path.cwd()))
    content = _read(job, spec.file)
    if content is None:
        raise UserError(
            f"the environment file {label} cannot be read",
            where=f"rule {job.rule.name}",
            do="Correct the path in conda:, which is relative to the Snakefile",
        )
    script = _read(job, spec.file.replace_suffix(_SUFFIXES, ".post-deploy.sh"))
    found = {p: spec.file.replace_suffix(_SUFFIXES, f".{p}.pin.txt") for p in MACHINES}
    pins = {p: pin for p, file in found.items() if (pin := _read(job, file)) is not None}
    if own.container and job.is_containerized:
        # Snakemake names environments in the image by contents, for the platform of the image.
        parts = (script, pins.get("linux-64"), content)
        digest = hashlib.md5(b"".join(part or b"" for part in parts), usedforsecurity=False)
        return f"{_IN_IMAGE}/{digest.hexdigest()}", ()
    uploads = {"": Upload(file_path(content, "environment.yaml"), content=content)}
    for platform, pin in pins.items():
        uploads[platform] = Upload(file_path(pin, "pin.txt"), content=pin)
    if script is not None:
        uploads["script"] = Upload(file_path(script, "post-deploy.sh"), content=script)
    parts_of = "\n".join([own.container or "", *(upload.path for upload in uploads.values())])
    first = (script or b"").split(b"\n", 1)[0].decode(errors="replace")
    environment = CondaFile(
        label=label,
        place=hashlib.sha256(parts_of.encode()).hexdigest()[:16],
        file=uploads[""].path,
        pins={platform: uploads[platform].path for platform in pins},
        post_deploy=uploads["script"].path if script is not None else "",
        interpreter=first[2:].strip() if first.startswith("#!") else "sh",
    )
    return environment, tuple(uploads.values())


def deployment_files(at: SiteJob) -> tuple[list[SourceFile], Path | None]:
    """Return the files of a job's conda environment, and its container image if that is a file."""
    own = at.own
    sources: list[SourceFile] = []
    if isinstance(own.conda, CondaEnvFileSpec):
        suffixes = [".post-deploy.sh", *(f".{platform}.pin.txt" for platform in MACHINES)]
        beside = [own.conda.file.replace_suffix(_SUFFIXES, suffix) for suffix in suffixes]
        exists = at.rule.workflow.sourcecache.exists
        sources = [own.conda.file, *(file for file in beside if file is not None and exists(file))]
    image = own.container and is_local_file(own.container) and parse_uri(own.container).uri_path
    return sources, Path(image) if image and os.path.exists(image) else None


def _read(job: Job, file: Any) -> bytes | None:
    """Read a source; None if there is no such file."""
    cache = job.rule.workflow.sourcecache
    if file is None or not cache.exists(file):
        return None
    with cache.open(file, "rb") as opened:
        content: bytes = opened.read()
    return content


def _image(at: SiteJob, source: str) -> tuple[Image, tuple[Upload, ...], tuple[str, ...]]:
    """Return a job's image, the uploads for it, and its path if it is in the working directory."""
    of_site, workdir = at.software.apptainer, at.context.workdir
    image = Image(
        source,
        place=hashlib.sha256(source.encode()).hexdigest()[:16],
        options=of_site.options if of_site else (),
        expand=at.config.site.expand,
        arguments=at.rule.workflow.deployment_settings.apptainer_args or "",
    )
    if not is_local_file(source):
        return image, (), ()
    path = str(parse_uri(source).uri_path)
    local = workdir / path
    if os.path.isabs(path) and not local.exists():
        return replace(image, source=path, place=""), (), ()
    if (mistake := _image_mistake(path, local)) is not None:
        why = None if local.exists() else FileNotFoundError(path)
        raise UserError(mistake, where=f"rule {at.rule.name}", do=_IMAGE_ADVICE) from why
    place = image_path(path, workdir)
    image = replace(image, source=place, place="")
    if (workdir / place).exists():
        return image, (), (place,)
    return image, (Upload(place, local=local),), ()


_IMAGE_ADVICE = (
    "Use a file on this machine, the absolute path of a file at the site, or a URL (docker://…)"
)


def _image_mistake(path: str, local: Path) -> str | None:
    if local.is_dir():
        return f"the container image {path} is a directory, not a file"
    return None if local.exists() else f"the container image {path} does not exist"


_URL = re.compile(r"[^:]*|[^:]+://.*|(file|docker-archive|oci|oci-archive):.*|.*/.*", re.DOTALL)
"""The name of an image: a path, a URL, or a kind of archive and its path."""


def deployment_mistake(at: SiteJob) -> str | None:
    """Return what is wrong with a job's own environment, as words after "rule NAME", or None."""
    own, workdir = at.own, at.context.workdir
    if own.project is not None and (why := _python_env_mistake(own.project, workdir)):
        return why
    if isinstance(own.conda, CondaEnvDirSpec) and not os.path.isabs(own.conda.path):
        return (
            f"has the conda environment {own.conda.path}, a directory on this machine that cannot"
            " be uploaded to a site (use an environment file, or an environment at the site)"
        )
    if mistake := conda_file_mistake(at.job):
        return mistake
    if isinstance(own.conda, CondaEnvFileSpec):
        content = _read(at.job, own.conda.file)
        if content is None:
            return f"has the environment file {own.conda.file}, which cannot be read"
        if why := _yaml_mistake(content):
            return f"has the environment file {own.conda.file}, which is not valid YAML: {why}"
    return _container_mistake(own.container or "", workdir, at.job)


@lru_cache(maxsize=1000)  # many jobs have the same environment
def _yaml_mistake(content: bytes) -> str:
    try:
        yaml.safe_load(content)
    except yaml.YAMLError as error:
        return " ".join(str(error).split())
    return ""


def conda_file_mistake(job: Job) -> str | None:
    """Return that a job's environment file is missing, as words after "rule NAME", or None.

    Snakemake reads it for its record of a finished job, even where the environment is not used, and
    ends the run if it cannot (persistence, `_conda_env`).
    """
    spec = job.conda_env_spec
    if not isinstance(spec, CondaEnvFileSpec) or job.rule.workflow.sourcecache.exists(spec.file):
        return None
    path = spec.file.get_path_or_uri(secret_free=True)
    if os.path.relpath(path) in find_products(job.dag):
        return None
    return f"has the environment file {spec.file}, which cannot be read"


def _container_mistake(container: str, workdir: Path, job: Job) -> str | None:
    if container and _URL.fullmatch(container) is None:
        likely = did_you_mean(f"docker://{container}")
        return f"cannot run: {container} is neither a file nor a URL{likely}"
    if container and is_local_file(container):
        path = str(parse_uri(container).uri_path)
        local = workdir / path
        if os.path.isabs(path) and not local.is_dir():
            return None
        # A rule may make the image.
        if os.path.normpath(path) not in find_products(job.dag):
            return (mistake := _image_mistake(path, local)) and f"cannot run: {mistake}"
    return None


def deployment_warnings(jobs: Iterable[SiteJob]) -> Iterator[str]:
    """Yield warnings about the rules' environments, once for each rule and each MLproject."""
    seen: set[object] = set()
    for at in jobs:
        everything = read_own(at.job, ALL_METHODS)
        named = at.rule.name if everything.project is None else everything.project.shown
        if (key := (everything.project is None, named)) in seen:
            continue
        seen.add(key)
        used = bool(at.own and not at.nested)  # otherwise a Snakemake at the site sets it up
        if everything.project is not None:
            yield from _of_environment(at, everything.project, used=used)
            continue
        own = at.own.directives()
        for method, directive in everything.directives().items():
            if method not in own:
                yield f"Ignoring {directive} of rule {named}; pass {OPTION} {method} to use it."
        image = at.software.apptainer or at.software.container_engine or at.software.pyxis
        if used and image and at.has_site:
            yield (
                f"rule {named} runs in its own environment, {at.own}, and not in the image of the"
                f" backend config of {at.site}."
            )


def _of_environment(at: SiteJob, project: Project, *, used: bool) -> Iterator[str]:
    """Yield what becomes of a project's environment."""
    environment = project.environment
    assert environment is not None, "the project has an environment"
    if used and environment.more:
        yield (
            f"Ignoring {' and '.join(environment.more)} in docker_env of {project.shown}: mount"
            " directories with Options, and set Variables, in the backend config."
        )
    if used:
        yield f"Entry points of {project.shown} run in its {environment}."
    elif at.has_site:
        software = ", ".join(describe_software(at.software))
        yield (
            f"Ignoring {environment} of {project.shown}: its entry points run"
            f" {f'in {software}' if software else 'without an environment'}, as the backend config"
            f" of {at.site} says; pass {OPTION} {METHODS[environment.key]} to use it."
        )


def drop_unrequested(job: Job) -> None:
    """Keep Snakemake from calling this machine's conda for an environment that is at a site.

    For its record of a finished job Snakemake exports environments that have no file (persistence,
    `_conda_env`), even unused ones, and fails without conda. It skips the export if a private field
    is set already. There is no public way.
    """
    for member in list_members(job):
        if DeploymentMethod.CONDA in member.rule.workflow.deployment_settings.deployment_method:
            return
        environment = member.conda_env
        if environment is not None and environment.is_externally_managed:
            environment._content = environment._content or environment.address.encode()


_LAUNCHER: Final = re.compile(r"(?<!\{)(?:\{\{)*\{resources(?:\.mpi|\[mpi\])[}:!]")


def has_launcher(job: Job) -> bool:
    """Return whether a rule's command starts its MPI tasks itself, with its resource `mpi`.

    Without an image, the command runs once, on the first node, and its launcher reaches the other
    nodes. The image of a backend config is started with `srun`, once per task, so that MPI reaches
    the scheduler without one inside the image. A launcher inside such a command would start all
    tasks again in each task, so with one the image is started only once, on the first node. A
    rule's own image is always started once.
    """
    text = job.rule.shellcmd
    return bool(job.resources.get("mpi") and text and _LAUNCHER.search(text))


def launcher_mistake(at: SiteJob) -> str | None:
    """Return why a command cannot find its launcher, as words that follow "rule NAME", or None.

    Only `srun` is checked: an image does not contain it.
    """
    launcher = str(at.job.resources.get("mpi")).split()
    if not has_launcher(at.job) or not launcher or os.path.basename(launcher[0]) != "srun":
        return None
    software = at.software
    image = software.apptainer or software.container_engine or software.pyxis
    if not (at.own.container if at.own else image):
        return None
    return (
        "starts srun in an image, which does not contain it (remove {resources.mpi} and its options"
        " from the command: srun starts the image of a backend config, once for each of resources:"
        " tasks; or use the image's own mpiexec, which reaches one node)"
    )
