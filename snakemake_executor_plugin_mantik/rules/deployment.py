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
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml
from snakemake.common import is_local_file, parse_uri
from snakemake.deployment.conda import CondaEnvDirSpec, CondaEnvFileSpec
from snakemake.shell import shell
from snakemake.sourcecache import LocalSourceFile, SourceFile
from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.environment import describe_software, image_path
from snakemake_executor_plugin_mantik.config.named_files import (
    NamedFileError,
    follow_requirements,
    rebase_requirements,
)
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.jobs.deployment import (
    MACHINES,
    CondaFile,
    Image,
    wrap_conda,
    wrap_container,
    wrap_modules,
    wrap_venv,
)
from snakemake_executor_plugin_mantik.jobs.paths import file_path
from snakemake_executor_plugin_mantik.mlproject.entry import read_python_env
from snakemake_executor_plugin_mantik.mlproject.project import Project, find_bound_entry_point

from . import Job
from .context import Method, Payload, RuleContext, start_words
from .resources import choose_site, config_environment, given_resources

METHODS: Final[dict[str, Method]] = {
    "python_env": "venv",
    "conda_env": DeploymentMethod.CONDA,
    "docker_env": DeploymentMethod.APPTAINER,
}
"""What deploys an environment, by its key in an MLproject file."""


def find_project(job: Job, methods: Collection[Method]) -> Project | None:
    """Return the project of a job's entry point if its environment is to be deployed."""
    given = find_bound_entry_point(getattr(job.rule, "params", None))
    environment = given.project.environment if given is not None else None
    if given is None or environment is None or METHODS[environment.key] not in methods:
        return None
    return given.project


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
    asked = read_python_env(project.folder, name)
    text = "".join(f"{line}\n" for line in asked.requirements)
    try:
        found = follow_requirements(text, posixpath.normpath(name), project.folder)
    except NamedFileError as error:
        raise UserError(f"its python_env cannot be used: {error}", do="Correct the file") from None
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
        version=".".join(asked.version.split(".")[:2]),
    )
    return wrapped, (upload,), inputs


def python_env_mistake(project: Project, workdir: Path) -> str | None:
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


_OPTION = "--mantik-software-deployment"

_ALL_METHODS: tuple[Method, ...] = (*DeploymentMethod, "venv")

_BLOCKED = ("R_LIBS", "PYTHONPATH", "PERLLIB", "PERL5LIB")
"""Variables that Snakemake unsets for a command in a conda environment (snakemake/shell.py)."""

_IN_IMAGE = "/conda-envs"
"""Directory of conda environments in an image of `containerized:` (snakemake/deployment)."""


def parse_methods(words: Iterable[str]) -> frozenset[Method]:
    """Return the methods that the setting names.

    Raises:
        UserError: a method is unknown.
    """
    known = {str(method): method for method in _ALL_METHODS}
    if unknown := [word for word in words if word not in known]:
        raise UserError(
            f"there is no software deployment {', '.join(map(repr, unknown))}",
            where=_OPTION,
            do=f"Use one of {', '.join(known)}; end the list with '--' if targets follow",
        )
    return frozenset(known[word] for word in words)


def nested_options(methods: Collection[Method]) -> list[str]:
    """Return the options with which a Snakemake at the site deploys the same methods."""
    names = sorted(str(method) for method in methods if isinstance(method, DeploymentMethod))
    return ["--software-deployment-method", *names] if names else []


@dataclass(frozen=True)
class RuleEnvironment:
    """A job's own environment. A part is None if the job has none, or if it is not requested.

    Attributes:
        modules: names of modules from `envmodules:`.
        conda: Snakemake's specification from `conda:`.
        container: path or URL from `container:` or `containerized:`.
        bare: whether the rule has `container: None`, and so runs in no container, not even in the
            backend config's.
        project: the MLproject whose environment this is, if the rule itself has none.
    """

    modules: tuple[str, ...] | None = None
    conda: Any = None
    container: str | None = None
    bare: bool = False
    project: Project | None = None

    def __bool__(self) -> bool:
        return bool(self.modules or self.conda or self.container or self.bare or self.project)


def read_own(job: Job, methods: Collection[Method]) -> RuleEnvironment:
    """Read a job's own environment, restricted to the requested methods."""
    project = None if _has_directive(job) else find_project(job, methods)
    if project is not None:
        return _of_project(project)
    modules = conda = container = None
    bare = False
    if DeploymentMethod.ENV_MODULES in methods and job.rule.env_modules:
        modules = tuple(job.rule.env_modules.names)
    if DeploymentMethod.CONDA in methods:
        conda = job.conda_env_spec
    if DeploymentMethod.APPTAINER in methods:
        container = job.container_img_url or None
        # The rule itself does not keep `container: None`.
        bare = job.rule.ruleinfo.container_img is False
    return RuleEnvironment(modules, conda, container and str(container), bare)


def _has_directive(job: Job) -> bool:
    bare = job.rule.ruleinfo.container_img is False
    return bool(job.rule.env_modules or job.conda_env_spec or job.container_img_url or bare)


def _of_project(project: Project) -> RuleEnvironment:
    environment = project.environment
    own = RuleEnvironment(project=project)
    if environment is not None and environment.key == "conda_env":
        file = LocalSourceFile(str(project.folder / environment.value))
        return replace(own, conda=CondaEnvFileSpec(file))
    if environment is not None and environment.key == "docker_env":
        image = environment.value
        return replace(own, container=image if "://" in image else f"docker://{image}")
    return own


def wrap_deployment(payload: Payload, job: Job, context: RuleContext) -> Payload:
    """Wrap the payload in the job's own environment.

    Raises:
        UserError: an environment file or image is not available.
    """
    own = read_own(job, context.deployment)
    rule = job.rule.name
    if own.modules:
        payload = _inside(payload)
        payload = payload.around(wrap_modules(own.modules, payload.command, rule=rule))
    if own.conda:
        payload = _inside(payload)
        environment, uploads = _conda(job, own)
        blocked = _BLOCKED if shell.conda_block_conflicting_envvars else ()
        text = wrap_conda(environment, payload.command, rule=rule, blocked=blocked)
        payload = payload.around(text, uploads)
    if own.project is not None and not own.conda and not own.container:
        payload = _inside(payload)
        payload = payload.around(*wrap_python_env(own.project, payload.command, rule=rule))
    if own.container:
        start, more = start_words(payload)
        image, uploads, inputs = _image(job, own.container, context)
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
    script = _beside(job, spec.file, ".post-deploy.sh")
    pins = {
        platform: pin
        for platform in MACHINES
        if (pin := _beside(job, spec.file, f".{platform}.pin.txt")) is not None
    }
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
    environment = CondaFile(
        label=label,
        place=hashlib.sha256(parts_of.encode()).hexdigest()[:16],
        file=uploads[""].path,
        pins={platform: uploads[platform].path for platform in pins},
        post_deploy=uploads["script"].path if script is not None else "",
        interpreter=_interpreter(script or b""),
    )
    return environment, tuple(uploads.values())


def deployment_files(job: Job, methods: Collection[Method]) -> tuple[list[SourceFile], Path | None]:
    """Return the files of a job's conda environment, and its container image if that is a file."""
    own = read_own(job, methods)
    sources: list[SourceFile] = []
    if isinstance(own.conda, CondaEnvFileSpec):
        suffixes = [".post-deploy.sh", *(f".{platform}.pin.txt" for platform in MACHINES)]
        beside = [own.conda.file.replace_suffix([".yaml", ".yml"], suffix) for suffix in suffixes]
        exists = job.rule.workflow.sourcecache.exists
        sources = [own.conda.file, *(file for file in beside if file is not None and exists(file))]
    if own.container and is_local_file(own.container):
        path = Path(parse_uri(own.container).uri_path)
        if path.exists():
            return sources, path
    return sources, None


def _interpreter(script: bytes) -> str:
    first = script.split(b"\n", 1)[0].decode(errors="replace")
    return first[2:].strip() if first.startswith("#!") else "sh"


def _beside(job: Job, file: Any, suffix: str) -> bytes | None:
    """Read the file of the same name with another suffix; None if it does not exist."""
    other = file.replace_suffix([".yaml", ".yml"], suffix)
    return None if other is None else _read(job, other)


def _read(job: Job, file: Any) -> bytes | None:
    cache = job.rule.workflow.sourcecache
    if not cache.exists(file):
        return None
    with cache.open(file, "rb") as opened:
        content: bytes = opened.read()
    return content


def _image(
    job: Job, source: str, context: RuleContext
) -> tuple[Image, tuple[Upload, ...], tuple[str, ...]]:
    """Return a job's image, the uploads for it, and its path if it is in the working directory.

    Raises:
        UserError: the image does not exist, or is a directory.
    """
    of_site = config_environment(job, context.sites).apptainer
    config = context.sites[choose_site(given_resources(job), context.sites)].config
    image = Image(
        source,
        place=hashlib.sha256(source.encode()).hexdigest()[:16],
        options=of_site.options if of_site else (),
        expand=config.site.expand,
        arguments=job.rule.workflow.deployment_settings.apptainer_args or "",
    )
    if not is_local_file(source):
        return image, (), ()
    path = str(parse_uri(source).uri_path)
    local = context.workdir / path
    if os.path.isabs(path) and not local.exists():
        return replace(image, source=path, place=""), (), ()
    if (mistake := _image_mistake(path, local)) is not None:
        why = None if local.exists() else FileNotFoundError(path)
        raise UserError(mistake, where=f"rule {job.rule.name}", do=_IMAGE_ADVICE) from why
    place = image_path(path, context.workdir)
    image = replace(image, source=place, place="")
    if (context.workdir / place).exists():
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


def deployment_mistake(job: Job, context: RuleContext, made: Collection[str]) -> str | None:
    """Return what is wrong with a job's own environment, as words after "rule NAME", or None.

    `made` holds the paths that the workflow makes: an image may be among them.
    """
    own = read_own(job, context.deployment)
    if own.project is not None and (why := python_env_mistake(own.project, context.workdir)):
        return why
    if isinstance(own.conda, CondaEnvDirSpec) and not os.path.isabs(own.conda.path):
        return (
            f"has the conda environment {own.conda.path}, a directory on this machine that cannot"
            " be uploaded to a site (use an environment file, or an environment at the site)"
        )
    if mistake := conda_file_mistake(job, made):
        return mistake
    if isinstance(own.conda, CondaEnvFileSpec):
        content = _read(job, own.conda.file)
        if content is None:
            return f"has the environment file {own.conda.file}, which cannot be read"
        try:
            yaml.safe_load(content)
        except yaml.YAMLError as error:
            why = " ".join(str(error).split())
            return f"has the environment file {own.conda.file}, which is not valid YAML: {why}"
    return _container_mistake(own.container or "", context, made)


def conda_file_mistake(job: Job, made: Collection[str]) -> str | None:
    """Return that a job's environment file is missing, as words after "rule NAME", or None.

    Snakemake reads it for its record of a finished job, even where the environment is not used, and
    ends the run if it cannot (persistence, `_conda_env`).
    """
    spec = job.conda_env_spec
    if not isinstance(spec, CondaEnvFileSpec) or job.rule.workflow.sourcecache.exists(spec.file):
        return None
    path = spec.file.get_path_or_uri(secret_free=True)
    if os.path.relpath(path) in made:
        return None
    return f"has the environment file {spec.file}, which cannot be read"


def _container_mistake(container: str, context: RuleContext, made: Collection[str]) -> str | None:
    if container and _URL.fullmatch(container) is None:
        return (
            f"cannot run: {container} is neither a file nor a URL (did you mean"
            f" docker://{container}?)"
        )
    if container and is_local_file(container):
        path = str(parse_uri(container).uri_path)
        local = context.workdir / path
        if os.path.normpath(path) not in made and (not os.path.isabs(path) or local.is_dir()):
            return (mistake := _image_mistake(path, local)) and f"cannot run: {mistake}"
    return None


def deployment_warnings(
    jobs: Iterable[Job], context: RuleContext, full: Callable[[Job], object]
) -> Iterator[str]:
    """Yield warnings about the rules' environments, once for each rule.

    `full` returns whether a Snakemake at the site sets up the job's environment.
    """
    checked: set[str] = set()
    projects: set[str] = set()
    for job in jobs:
        rule = job.rule
        if rule.name in checked:
            continue
        checked.add(rule.name)
        everything = read_own(job, _ALL_METHODS)
        own = read_own(job, context.deployment)
        if (project := everything.project) is not None:
            if project.shown not in projects:
                projects.add(project.shown)
                yield from _of_environment(job, project, context, used=bool(own and not full(job)))
            continue
        for name, method in _DIRECTIVES.items():
            if getattr(everything, name) and not getattr(own, name):
                yield (
                    f"Ignoring {_shown(everything, name)} of rule {rule.name}; pass"
                    f" {_OPTION} {method} to use it."
                )
        if own and not full(job):
            yield from _winner(job, own, context)


def _of_environment(
    job: Job, project: Project, context: RuleContext, *, used: bool
) -> Iterator[str]:
    """Yield what becomes of a project's environment, once for each project."""
    environment = project.environment
    assert environment is not None, "the project has an environment"
    if used and environment.more:
        yield (
            f"Ignoring {' and '.join(environment.more)} in docker_env of {project.shown}: mount"
            " directories with Options, and set Variables, in the backend config."
        )
    if used:
        yield f"Entry points of {project.shown} run in its {environment}."
        return
    try:
        site = choose_site(given_resources(job), context.sites)
        software = ", ".join(describe_software(config_environment(job, context.sites)))
    except UserError:
        return  # the site is not known yet, or reported as a mistake
    yield (
        f"Ignoring {environment} of {project.shown}: its entry points run"
        f" {f'in {software}' if software else 'without an environment'}, as the backend config of"
        f" {site} says; pass {_OPTION} {METHODS[environment.key]} to use it."
    )


_DIRECTIVES = {
    "conda": DeploymentMethod.CONDA,
    "container": DeploymentMethod.APPTAINER,
    "bare": DeploymentMethod.APPTAINER,
    "modules": DeploymentMethod.ENV_MODULES,
}


def describe_own(own: RuleEnvironment) -> str:
    """Describe an environment in words: `conda: env.yaml and container: docker://x`."""
    if own.project is not None:
        return f"{own.project.environment} of {own.project.shown}"
    return " and ".join(_shown(own, name) for name in _DIRECTIVES if getattr(own, name))


def _shown(own: RuleEnvironment, name: str) -> str:
    if name == "modules":
        return f"envmodules: {', '.join(own.modules or ())}"
    if name == "container":
        return f"container: {own.container}"
    if name == "bare":
        return "container: None"
    spec = own.conda
    shown = spec.file if isinstance(spec, CondaEnvFileSpec) else getattr(spec, "path", None)
    return f"conda: {shown or spec.name}"


def _winner(job: Job, own: RuleEnvironment, context: RuleContext) -> Iterator[str]:
    try:
        site = choose_site(given_resources(job), context.sites)
        environment = config_environment(job, context.sites)
    except UserError:
        return  # the site is not known yet, or reported as a mistake
    if environment.apptainer or environment.container_engine or environment.pyxis:
        yield (
            f"rule {job.rule.name} runs in its own environment, {describe_own(own)}, and not in the"
            f" image of the backend config of {site}."
        )


def drop_unrequested(job: Job) -> None:
    """Keep Snakemake from calling this machine's conda for an environment that is at a site.

    For its record of a finished job Snakemake exports environments that have no file (persistence,
    `_conda_env`), even unused ones, and fails without conda. It skips the export if a private field
    is set already. There is no public way.
    """
    for member in job.jobs if job.is_group() else (job,):
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


def launcher_mistake(job: Job, context: RuleContext) -> str | None:
    """Return why a command cannot find its launcher, as words that follow "rule NAME", or None.

    Only `srun` is checked: an image does not contain it.
    """
    launcher = str(job.resources.get("mpi")).split()
    if not has_launcher(job) or not launcher or os.path.basename(launcher[0]) != "srun":
        return None
    own = read_own(job, context.deployment)
    boxed: object = own.container
    if not own:
        try:
            environment = config_environment(job, context.sites)
        except UserError:
            return None  # reported with all other mistakes in resources
        boxed = environment.apptainer or environment.container_engine or environment.pyxis
    if not boxed:
        return None
    return (
        "starts srun in an image, which does not contain it (remove {resources.mpi} and its options"
        " from the command: srun starts the image of a backend config, once for each of resources:"
        " tasks; or use the image's own mpiexec, which reaches one node)"
    )
