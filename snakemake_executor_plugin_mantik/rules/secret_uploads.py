"""Refuse jobs that would upload what must not leave this machine (`staging.secret_files`)."""

import os
from collections.abc import Iterable
from functools import cache

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.environment import environment_uploads
from snakemake_executor_plugin_mantik.config.exclude import Include
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.staging.secret_files import SecretFiles
from snakemake_executor_plugin_mantik.storage.paths import storable_path

from . import Job
from .context import Payload, RuleContext
from .resources import choose_environment, choose_site, given_resources, split_undetermined


def refuse_secret_inputs(jobs: Iterable[Job], context: RuleContext) -> None:
    """Refuse inputs of jobs, and files of their environments, that must not leave this machine.

    What other jobs make is not looked at: it comes from a site, or the rule has made it to be read.

    Raises:
        UserError: lists the rules, each with its files.
    """
    found: dict[str, str] = {}
    for job in jobs:
        given, _ = split_undetermined(given_resources(job))
        config = context.sites[choose_site(given, context.sites)].config
        made = {str(path) for files in job.dag.dependencies.get(job, {}).values() for path in files}
        read = [storable_path(path) or str(path) for path in job.input if str(path) not in made]
        environment = config.named_environment(choose_environment(given, config))
        read += [str(local) for local, _ in environment_uploads(environment, context.workdir)]
        _look(found, job, read, config)
    _refuse(found)


def refuse_secret_code(job: Job, payload: Payload, config: BackendConfig, *more: str) -> None:
    """Refuse what a job's command needs that must not leave this machine; `more` has further files.

    Raises:
        UserError: names the rule and the files.
    """
    made = set(map(str, job.rule.workflow.checkpoints.created_output))
    read = [path for path in payload.inputs if path not in made]
    read += [str(upload.local) for upload in payload.uploads if upload.local is not None]
    found: dict[str, str] = {}
    _look(found, job, [*read, *more], config)
    _refuse(found)


def _look(found: dict[str, str], job: Job, paths: Iterable[str], config: BackendConfig) -> None:
    """Note the rule of a job if one of `paths` must not leave this machine."""
    include = tuple(config.site.include)
    if secrets := "; ".join(filter(None, (_look_at(include, os.path.relpath(p)) for p in paths))):
        found.setdefault(job.rule.name, secrets)


@cache  # many jobs read the same files
def _look_at(include: tuple[str, ...], path: str) -> str:
    return _secret_files(include).look_at(path, path)


@cache
def _secret_files(include: tuple[str, ...]) -> SecretFiles:
    return SecretFiles(Include(include))


def _refuse(found: dict[str, str]) -> None:
    if found:
        raise UserError(
            "files that must not leave this machine would be uploaded (nothing submitted): "
            + "; ".join(f"rule {name} reads {found[name]}" for name in sorted(found)),
            do="Take them out, and pass secrets with envvars:. To upload one that only looks like a"
            " secret, add it to Site: Include in the backend config",
        )
