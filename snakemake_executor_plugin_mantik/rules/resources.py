"""The resources that a rule asks for, and the site that they name."""

import difflib
import inspect
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from snakemake.common.tbdstring import TBDString
from snakemake.resources import Resources
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.reasons import FAILURES, Reason, parse_reasons
from snakemake_executor_plugin_mantik.jobs.resources import suggest_resource
from snakemake_executor_plugin_mantik.rules import Job

SITE_RESOURCE = "mantik_site"
RETRY_RESOURCE = "mantik_retry_on"
"""Names the reasons for which a job is tried again; without it, all of them."""
TRACK_RESOURCE = "mantik_track"
"""Says whether a rule's jobs become MLflow runs; without it `--mantik-track` does."""
_OURS = {
    SITE_RESOURCE: "Choose the site",
    RETRY_RESOURCE: "Limit retries to reasons",
    TRACK_RESOURCE: "Say whether jobs are tracked",
}


def given_resources(job: Job) -> dict[str, object]:
    """The resources that somebody asked for, Snakemake's built-in defaults left out.

    `--default-resources` with any value adds `mem` and `disk` to every rule, with values that
    would override the backend config's; such a value counts as not given.
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


def split_undetermined(resources: Mapping[str, object]) -> tuple[dict[str, object], frozenset[str]]:
    """The resources that are known, and the names of those that follow from files to be made yet.

    A function of `input` (`input.size_mb`) gives Snakemake's placeholder until its files are there.
    """
    later = frozenset(name for name, value in resources.items() if isinstance(value, TBDString))
    return {name: value for name, value in resources.items() if name not in later}, later


def are_resources_known(job: Job) -> bool:
    """Whether what a job asks for can be told before the jobs that it waits for have run.

    Snakemake asks functions of resources when a job is ready; asked earlier, they may raise
    anything. Only for a missing file it puts a placeholder in their place.

    Raises:
        WorkflowError: it cannot be told although all inputs are there.
    """
    try:
        job.resources  # noqa: B018 - evaluated, and kept, when it is read
    except WorkflowError:
        if all(map(os.path.lexists, job.input)):
            raise
        return False
    return True


def job_retry_reasons(job: Job) -> Collection[Reason]:
    """The reasons for which a job that failed is tried again, as far as it has retries.

    Raises:
        UserError: the resource that tells them is wrong.
    """
    return parse_retry_reasons(job.resources.get(RETRY_RESOURCE))


def parse_retry_reasons(value: object) -> Collection[Reason]:
    """The reasons that the value of `mantik_retry_on` names; all for none, or none that is known.

    Raises:
        UserError: it is not a text, or names what is no reason.
    """
    if value is None or isinstance(value, TBDString):
        return FAILURES
    where = f"the resource {RETRY_RESOURCE}={value!r}"
    try:
        return parse_reasons(value if isinstance(value, str) else "")
    except UserError as error:
        raise UserError(error.what, where=where, do=error.do) from None


def _expression(resource: Any) -> object:
    """The expression that a resource was declared with, if it came from an option or a default.

    Snakemake does not keep it for sizes, but the function that it makes of the expression does.
    """
    evaluator = getattr(resource, "_evaluator", None)
    if evaluator is None:
        return None
    return inspect.getclosurevars(inspect.unwrap(evaluator)).nonlocals.get("value")


def choose_site(resources: dict[str, object], sites: Mapping[str, object]) -> str:
    """The site that a rule's resources name, taken out of them; else the first one.

    Raises:
        UserError: there is no such site, or a resource is likely meant for this one.
    """
    refuse_misspelt(resources)
    wanted = resources.pop(SITE_RESOURCE, None)
    if wanted is None:
        return next(iter(sites))
    if wanted in sites:
        return str(wanted)
    by_lower = {name.lower(): name for name in sites}
    close = difflib.get_close_matches(str(wanted).lower(), by_lower, n=1)
    likely = f" (did you mean {by_lower[close[0]]}?)" if close else ""
    raise UserError(
        f"there is no site {wanted!r}{likely}; the known ones are {', '.join(sites)}",
        where=f"the resource {SITE_RESOURCE}",
        do="Correct the name or give its file with --mantik-backend-config",
    )


def refuse_misspelt(names: Iterable[str]) -> None:
    """See to it that no resource is one of ours misspelt: the job would run at another site, say.

    Raises:
        UserError: one is.
    """
    for name in names:
        if name in _OURS:
            continue
        plain = _letters(name)
        for ours, what in _OURS.items():
            if difflib.get_close_matches(plain, [_letters(ours)], cutoff=0.85):
                raise UserError(
                    f"there is no resource {name} (did you mean {ours}?)",
                    where=f"the resource {name}",
                    do=f"{what} with {ours}, or give the resource another name",
                )


def resource_warnings(jobs: Iterable[Job], limits: Collection[str]) -> Iterator[str]:
    """What to tell of resources that a site is not asked for and that are likely meant to be.

    Args:
        jobs: Snakemake's jobs.
        limits: resources that Snakemake itself limits (`--resources`), which have a meaning there.
    """
    told: set[tuple[str, str]] = set()
    for job in jobs:
        for name in given_resources(job):
            rule = job.rule.name
            if (
                name not in limits
                and (rule, name) not in told
                and (likely := suggest_resource(name))
            ):
                told.add((rule, name))
                yield (
                    f"rule {rule}: the resource {name} means nothing to a site and is not asked for"
                    f" (did you mean {likely}?)."
                )


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
