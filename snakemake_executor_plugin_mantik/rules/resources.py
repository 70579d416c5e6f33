"""Read the resources that a rule requests, and the site that they name."""

import inspect
import os
import traceback
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from snakemake.common.tbdstring import TBDString
from snakemake.resources import Resources
from snakemake_interface_common.exceptions import WorkflowError

from ..common.errors import UserError, did_you_mean, find_alike
from ..config.environment import ENVIRONMENT_RESOURCE, unknown_environment
from ..config.model import BackendConfig
from ..jobs.pools import POOL_RESOURCE
from ..jobs.reasons import FAILURES, Reason, parse_reasons
from ..jobs.segments import CHECKPOINT_PATHS, CONTINUE, CONTINUE_ON, WARN
from . import Job

SITE_RESOURCE = "mantik_site"
ANY_SITE = "any"
"""In place of a site: whichever is expected to start a job first (`engine.expect`)."""
WAIT_RESOURCE = "mantik_wait"
"""Sets how long a job may wait to start at a site before it goes to the next one of its sites."""
RETRY_RESOURCE = "mantik_retry_on"
"""Names the reasons of failure after which a job is retried. By default, all of them."""
TRACK_RESOURCE = "mantik_track"
"""Sets whether a rule's jobs become MLflow runs. By default, `--mantik-track` decides."""
_OURS = {
    SITE_RESOURCE: "Choose the site",
    WAIT_RESOURCE: "Limit how long a job waits at a site",
    ENVIRONMENT_RESOURCE: "Choose the environment",
    RETRY_RESOURCE: "Limit retries to reasons",
    POOL_RESOURCE: "Choose the pool",
    TRACK_RESOURCE: "Choose whether jobs are tracked",
    CONTINUE: "Let a job go on past its walltime",
    CHECKPOINT_PATHS: "Name what a job goes on from",
    WARN: "Set when a job is warned of its end",
    CONTINUE_ON: "Choose the ends after which a job goes on",
}


def given_resources(job: Job) -> dict[str, object]:
    """Return the resources that the user requested, without Snakemake's built-in defaults.

    `tmpdir`, `shell_exec` and Snakemake's internal resources (`_cores`) are left out, too.
    `--default-resources` with any value adds `mem` and `disk` to every rule. These values would
    override the backend config's, so they count as not given.
    """
    given = {
        name: value
        for name, value in job.resources.items()
        if not name.startswith("_") and name not in ("tmpdir", "shell_exec")
    }
    for size, default in Resources.DEFAULTS["full"].items():
        if _expression(job.rule.resources.get(f"{size}_mb")) == default:
            for name in (size, f"{size}_mb", f"{size}_mib"):
                given.pop(name, None)
    return given


def are_resources_known(job: Job) -> bool:
    """Return whether a job's resources can be evaluated before the jobs it depends on have run.

    Snakemake calls functions of resources when a job is ready. Called earlier, they may raise
    anything. Only for a missing file does Snakemake use a placeholder; if a function asks for the
    files of an unfinished checkpoint, Snakemake (9.27) itself fails, with an AttributeError.

    Raises:
        WorkflowError: evaluation fails although all inputs exist.
        UserError: an option has a name of Python for a resource, as `any` is one.
    """
    try:
        job.resources  # noqa: B018 - reading evaluates and caches it
    except AttributeError:
        return False
    except ValueError as error:
        raise function_mistake(job.rule, error) from None
    except WorkflowError:
        if all(map(os.path.lexists, job.input)):
            raise
        return False
    return True


def function_mistake(rule: Any, error: ValueError) -> UserError:
    """Return the mistake behind Snakemake's `error` that a resource of a rule has no value."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    name = getattr(frame.f_locals.get("self"), "name", "")
    return UserError(
        f"its resource {name} has a function in place of a value",
        where=f"rule {rule.name}",
        do=f"In options and profiles, names such as {ANY_SITE} and max are functions of Python:"
        f""" put it in quotes twice, as in {SITE_RESOURCE}="'{ANY_SITE}'\"""",
    )


def job_retry_reasons(job: Job) -> Collection[Reason]:
    """Return the reasons of failure after which a job is retried, as far as it has retries.

    All, if `mantik_retry_on` is not set or not known yet.

    Raises:
        UserError: its value is not a string, or names an unknown reason.
    """
    value = job.resources.get(RETRY_RESOURCE)
    if value is None or isinstance(value, TBDString):
        return FAILURES
    where = f"the resource {RETRY_RESOURCE}={value!r}"
    try:
        return parse_reasons(value if isinstance(value, str) else "")
    except UserError as error:
        raise UserError(error.what, where=where, do=error.do) from None


def _expression(resource: Any) -> object:
    """Return the expression that declared a resource, if it came from an option or a default.

    For sizes Snakemake keeps it only in the function that it creates from the expression.
    """
    evaluator = getattr(resource, "_evaluator", None)
    if evaluator is None:
        return None
    return inspect.getclosurevars(inspect.unwrap(evaluator)).nonlocals.get("value")


def choose_sites(resources: dict[str, object], sites: Mapping[str, object]) -> tuple[str, ...]:
    """Remove the sites from a rule's resources and return their names, by default the first site.

    Several, separated by commas, are tried in their order (`WAIT_RESOURCE`). `ANY_SITE` stands for
    all of them.

    Raises:
        UserError: a site is unknown, a resource looks like a misspelt `mantik_…` resource, or there
            are several sites and it is not said how long a job waits at each.
    """
    refuse_misspelt(resources)
    wanted = resources.pop(SITE_RESOURCE, None)
    if wanted == ANY_SITE:
        return tuple(sites)
    names = [name.strip() for name in str(wanted).split(",")] if wanted is not None else []
    for name in names:
        if name not in sites:
            likely = did_you_mean(find_alike(name, sites))
            raise UserError(
                f"there is no site {name!r}{likely}; the known ones are {', '.join(sites)}",
                where=f"the resource {SITE_RESOURCE}",
                do=f'Put "{ANY_SITE}" in quotes: without them it is a function of Python'
                if isinstance(wanted, bool)
                else "Correct the name, or add the site's config with --mantik-backend-config",
            )
    if len(names) > 1 and resources.get(WAIT_RESOURCE) is None:
        raise UserError(
            f"the resource {SITE_RESOURCE}={wanted!r} does not say when to try the next site",
            do=f'Add how long a job may wait to start at each, such as {WAIT_RESOURCE}="30m"',
        )
    return tuple(names) or tuple(sites)[:1]


def choose_environment(resources: Mapping[str, object], config: BackendConfig) -> str:
    """Return the name of the config's environment that a rule names; empty for the default.

    Raises:
        UserError: there is no such environment.
    """
    wanted = resources.get(ENVIRONMENT_RESOURCE)
    if wanted is None or isinstance(wanted, TBDString):
        return ""
    if wanted not in config.environments:
        raise unknown_environment(str(wanted), config, f"the resource {ENVIRONMENT_RESOURCE}")
    return str(wanted)


@cache  # many jobs have the same resources
def _misspelt(name: str) -> str | None:
    """Return the name of this plugin's resource that a name looks like; None if it is right."""
    letters = {ours.replace("_", ""): ours for ours in _OURS}
    alike = find_alike(name.replace("_", "").replace("-", ""), letters, cutoff=0.85)
    return letters[alike] if alike and name not in _OURS else None


def refuse_misspelt(names: Iterable[str]) -> None:
    """Refuse misspelt names of this plugin's resources, which would be ignored silently."""
    for name in names:
        ours = _misspelt(name)
        if ours or (name.startswith("mantik_") and name not in _OURS):
            raise UserError(
                f"there is no resource {name}{did_you_mean(ours or '')}",
                where=f"the resource {name}",
                do=f"{_OURS[ours]} with {ours}, or rename the resource"
                if ours
                else f"Use one of {', '.join(_OURS)}, or rename the resource",
            )
