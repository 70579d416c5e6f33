"""From a Snakemake job to a JobRequest: what a `shell:` rule runs, and what cannot run yet.

Snakemake runs a shell command through `snakemake.shell` in its own process; here the same command
is rendered for another machine. It differs from `job.shellcmd` (all of this was tried): rules of a
module see their module's globals, `{resources.tmpdir}` is the node's, and the shell's prefix,
suffix and name belong to the command. A value that is still to be determined is refused.
"""

import difflib
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from snakemake.common.tbdstring import TBDString
from snakemake.io import is_flagged
from snakemake.iocontainers import ResourceList
from snakemake.resources import Resources
from snakemake.settings.types import DeploymentMethod
from snakemake.shell import shell

from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.errors import UserError, WorkflowNotRunnable
from snakemake_executor_plugin_mantik.jobs.spec import Benchmark, OutputFile
from snakemake_executor_plugin_mantik.measuring import measured_path
from snakemake_executor_plugin_mantik.mlproject.project import folder_mistake, given_of

Job = Any
"""A Snakemake job; Snakemake's own classes are not typed."""

SITE_RESOURCE = "mantik_site"
_PLAIN_SITE = "mantiksite"

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""What Snakemake sets to the number of threads around a shell command (snakemake/shell.py)."""

_RULE_NAMES = frozenset(
    {"input", "output", "params", "wildcards", "threads", "resources", "log", "rule", "jobid"}
)
"""Names in a command that mean the job's own things and no global of the workflow."""

_PLACEHOLDER = "$TMPDIR"


def request(
    job: Job, *, sites: Mapping[str, object], secrets: Mapping[str, str], forced: bool
) -> JobRequest:
    """What the engine is asked for a job of a `shell:` rule.

    Args:
        job: the Snakemake job; `obstacle` has found nothing in the way.
        sites: the known sites; the first one serves where the rule names none.
        secrets: values of the workflow's `envvars:`.
        forced: whether the user asked to run it whatever an earlier run finished.

    Raises:
        UserError: a value is not determined, or an unknown site is named.
    """
    rule = job.rule
    resources = given_resources(job)
    site = site_of(resources, sites)
    tmpdir = _tmpdir(job)
    wildcards = {key: str(value) for key, value in job.wildcards_dict.items()}
    outputs = tuple(_outputs(job))
    identity = [rule.name, sorted(wildcards.items()), [o.path for o in outputs]]
    identified = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    benchmark = None
    if job.benchmark is not None:
        runs = tuple(command(job, tmpdir, i) for i in range(job.benchmark_repeats))
        benchmark = Benchmark(measured_path(identified), runs)
        outputs += (OutputFile(benchmark.path),)
    variables = dict.fromkeys(_THREAD_VARIABLES, str(job.threads))
    if tmpdir != _PLACEHOLDER:
        variables["TMPDIR"] = tmpdir
    details = ", ".join(f"{key}={value}" for key, value in wildcards.items())
    return JobRequest(
        number=job.jobid,
        job=identified,
        rule=rule.name,
        name=f"{rule.name} {details}" if details else rule.name,
        site=site,
        command=benchmark.commands[0] if benchmark else command(job, tmpdir),
        benchmark=benchmark,
        shell=os.path.basename(_executable(job) or "bash"),
        resources=resources,
        threads=job.threads,
        variables=variables,
        inputs=tuple(dict.fromkeys(map(_plain, job.input))),
        outputs=outputs,
        umask=_umask(),
        secrets=dict(secrets),
        parameters=json.dumps(sorted(repr(value) for value in job.non_derived_params)),
        forced=forced,
    )


@cache
def _umask() -> int:
    """The file mode mask of this process. It can only be read by setting it: once is enough."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def command(job: Job, tmpdir: str = _PLACEHOLDER, iteration: int | None = None) -> str:
    """The text that the shell gets after `-c`, the same as Snakemake's own for a local job.

    Args:
        job: the Snakemake job.
        tmpdir: its directory for temporary files.
        iteration: which run of a command that is measured it is, from 0.

    Raises:
        UserError: a value in the command is not determined before the job runs.
    """
    rule = job.rule
    names = {name: value for name, value in rule.module_globals.items() if name not in _RULE_NAMES}
    resources = ResourceList(fromdict={**dict(job.resources.items()), "tmpdir": tmpdir})
    names |= {"resources": resources, "bench_iteration": iteration}
    text: str = job.format_wildcards(rule.shellcmd, **names)
    if str(TBDString()) in text and str(TBDString()) not in rule.shellcmd:
        raise UserError(
            "a value in the shell command is still to be determined (<TBD>)",
            where=f"rule {rule.name}",
            do="Make the parameter or resource independent of what is only known inside the job",
        )
    # Snakemake keeps prefix and suffix in private fields only; there is no other way to them.
    prefix = shell._get_process_prefix(_executable(job))
    return " ".join((prefix, text, shell._process_suffix)).strip()


def _executable(job: Job) -> str | None:
    chosen: str | None = job.resources.get("shell_exec") or shell.get_executable()
    return chosen


def _tmpdir(job: Job) -> str:
    """The rule's own temporary directory, or the placeholder for the node's."""
    declared = job.rule.resources.get("tmpdir")
    raw = getattr(declared, "raw", declared)
    if raw is None or raw == Resources.DEFAULTS["bare"]["tmpdir"]:
        return _PLACEHOLDER
    expanded = job.rule.expand_resources(job.wildcards_dict, job.input, job.attempt)
    return str(expanded.tmpdir)


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


def determined(resources: Mapping[str, object]) -> tuple[dict[str, object], frozenset[str]]:
    """The resources that are known, and the names of those that follow from files to be made yet.

    A function of `input` (`input.size_mb`) gives Snakemake's placeholder until its files are there.
    """
    later = frozenset(name for name, value in resources.items() if isinstance(value, TBDString))
    return {name: value for name, value in resources.items() if name not in later}, later


def _expression(resource: Any) -> object:
    """The expression that a resource was declared with, if it came from an option or a default.

    Snakemake does not keep it for sizes, but the function that it makes of the expression does.
    """
    evaluator = getattr(resource, "_evaluator", None)
    if evaluator is None:
        return None
    return inspect.getclosurevars(inspect.unwrap(evaluator)).nonlocals.get("value")


def site_of(resources: dict[str, object], sites: Mapping[str, object]) -> str:
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
    """See to it that no resource is `mantik_site` misspelt: the job would run at another site.

    Raises:
        UserError: one is.
    """
    for name in names:
        plain = name.lower().replace("_", "").replace("-", "")
        if name != SITE_RESOURCE and difflib.get_close_matches(plain, [_PLAIN_SITE], cutoff=0.85):
            raise UserError(
                f"there is no resource {name} (did you mean {SITE_RESOURCE}?)",
                where=f"the resource {name}",
                do=f"Choose the site with {SITE_RESOURCE}, or give the resource another name",
            )


def _outputs(job: Job) -> Iterable[OutputFile]:
    for path in job.output:
        yield OutputFile(
            path=_plain(path),
            kind="touched" if is_flagged(path, "touch") else "output",
            directory=is_flagged(path, "directory"),
            keep=is_flagged(path, "update"),
        )
    for path in job.log:
        yield OutputFile(path=_plain(path), kind="log")


def _plain(path: Any) -> str:
    """A path as archives and listings have it: without `./` and `//`."""
    return os.path.normpath(str(path))


_NOT_THIN: tuple[tuple[Callable[[Job], bool], str], ...] = (
    (lambda job: job.rule.is_script, "has a script: directive"),
    (lambda job: job.rule.is_notebook, "has a notebook: directive"),
    (lambda job: job.rule.is_wrapper, "has a wrapper: directive"),
    (lambda job: job.rule.is_cwl, "has a cwl: directive"),
    (lambda job: job.rule.is_template_engine, "has a template_engine: directive"),
    (lambda job: job.rule.shellcmd is None, "has a run: directive"),
    (lambda job: job.rule.shadow_depth is not None, "has a shadow: directive"),
    (lambda job: job.is_pipe, "writes to a pipe()"),
    (lambda job: job.is_service, "is a service()"),
)


def obstacle(job: Job, deployment: Iterable[DeploymentMethod]) -> str | None:
    """Why a job cannot run at a site yet, in words that follow "rule NAME"; None if it can."""
    if job.is_group():
        return "belongs to a group or pipe"
    for found, words in _NOT_THIN:
        if found(job):
            return words
    # Snakemake gathers the jobs of a group later, just before they are sent.
    if job.group is not None:
        return "belongs to a group or pipe"
    deployed = {
        DeploymentMethod.CONDA: job.rule.conda_env,
        DeploymentMethod.APPTAINER: job.rule.container_img,
        DeploymentMethod.ENV_MODULES: job.rule.env_modules,
    }
    for method in deployment:
        if deployed.get(method):
            return f"has its own environment with --software-deployment-method {method}"
    return _outside(job)


def _outside(job: Job) -> str | None:
    """What of a job is not in the working directory and so not at a site."""
    given = given_of(job.rule.params)
    if given is not None and (mistake := folder_mistake(given.project.relative_folder())):
        return mistake
    for path in [*job.input, *job.output, *job.log]:
        if os.path.isabs(path) or _plain(path).split("/")[0] == "..":
            return f"uses {path}, which is outside of the working directory or absolute"
        if ".." in str(path).split("/"):
            return f"uses {path}: at a site a path may not go up and down again, write it plainly"
    return None


def refuse(jobs: Iterable[Job], deployment: Iterable[DeploymentMethod]) -> None:
    """See to it that all `jobs` can run at a site.

    Raises:
        WorkflowNotRunnable: telling each rule that cannot, once, and why.
    """
    deployment = tuple(deployment)
    found: dict[str, str] = {}
    for job in jobs:
        members = job.jobs if job.is_group() else (job,)
        reason = obstacle(job, deployment)
        if reason is not None:
            found.update({member.rule.name: reason for member in members})
    if found:
        raise WorkflowNotRunnable(
            "not every rule can run at a site yet (nothing was sent): "
            + "; ".join(f"rule {name} {reason}" for name, reason in sorted(found.items())),
            do="Rewrite these rules with shell: and with files in the working directory, or name"
            " them in localrules: to run them here",
        )
