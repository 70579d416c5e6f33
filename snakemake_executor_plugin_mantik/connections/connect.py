"""Credentials, clients and observers of a workflow's sites."""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from snakemake_executor_plugin_mantik.common.errors import printable
from snakemake_executor_plugin_mantik.config.reading import LoadedConfig
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.sites import make_issuer, make_site
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.sites.credentials import Credential, require_all
from snakemake_executor_plugin_mantik.tracking.controller.tracker import Tracker
from snakemake_executor_plugin_mantik.tracking.masking import (
    config_secrets,
    credential_secrets,
    make_masker,
    secret_values,
)
from snakemake_executor_plugin_mantik.tracking.run import tracking_target
from snakemake_executor_plugin_mantik.tracking.workflow import TrackedWorkflow

_OF_CLIENTS = (
    "workspace", "storage", "sharing", "scheduler", "ca_file", "proxy", "timeout_s",
    "concurrent_requests", "submissions_per_second",
)  # fmt: skip
"""The settings of a site that its client uses; the others are the engine's."""


def find_site_credentials(
    configs: Mapping[str, LoadedConfig], workdir: Path
) -> dict[str, Credential]:
    """Find the credentials of the sites in `configs`, in the environment or the keyring.

    Raises:
        CredentialError: lists everything that is missing at any of them.
    """
    return require_all(
        {name: c.config.api for name, c in configs.items()},
        os.environ,
        issuers={name: make_issuer(c, workdir) for name, c in configs.items()},
    )


def find_secrets(
    configs: Mapping[str, LoadedConfig], credentials: Mapping[str, Credential]
) -> Callable[[str], str]:
    """Return a function that masks all secrets known here in a text."""
    secrets = [*secret_values(os.environ), *credential_secrets(credentials.values())]
    for loaded in configs.values():
        secrets += config_secrets(loaded.config)
    return make_masker(secrets)


def make_tracker(
    configs: Mapping[str, LoadedConfig],
    credentials: Mapping[str, Credential],
    workdir: Path,
    notify: Callable[[str], None],
    *,
    workflow: TrackedWorkflow | None = None,
    direct: Mapping[str, str] | None = None,
) -> Tracker:
    """Make the tracker of jobs' MLflow runs, not started; it masks all secrets known here.

    `notify` writes a line to the user's log. `workflow` is the one whose jobs are run, if any.
    `direct` has variables for jobs that log to the tracking server themselves; such jobs wait
    for MLflow to make their runs, some seconds at most beyond what the site's pace delays them.
    """
    texts = {n: c.path.read_text(errors="replace") for n, c in configs.items()}
    return Tracker(
        workdir,
        tracking_target(os.environ, workdir),
        texts,
        mask=find_secrets(configs, credentials),
        notify=lambda text: notify(printable(text)),
        workflow=workflow,
        direct=direct,
        paces={name: c.config.site.submissions_per_second for name, c in configs.items()},
    )


def make_sites(
    configs: Mapping[str, LoadedConfig],
    credentials: Mapping[str, Credential],
    planners: Mapping[str, Planner],
    workspace: str,
) -> dict[str, tuple[Site, Planner]]:
    """Make the sites by name; names for one workspace, user and connection share a client."""
    made: dict[object, Site] = {}
    sites: dict[str, tuple[Site, Planner]] = {}
    for name, loaded in configs.items():
        config, credential = loaded.config, credentials[name]
        key = (
            config.api_url, config.firecrest, *(getattr(config.site, k) for k in _OF_CLIENTS),
            id(credential), planners[name].account,
        )  # fmt: skip
        if key not in made:
            made[key] = make_site(
                loaded, credential, workspace, project=planners[name].project,
                account=planners[name].account,
            )  # fmt: skip
        sites[name] = (made[key], planners[name])
    return sites


def workspace_name(home: Path, workflow: str) -> str:
    """Return the name of the workflow's own workspace: readable, and unique to each directory.

    `home` and `workflow` are those of its journal (`Journal`).
    """
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", home.name).strip("-.")[:40] or "workflow"
    identity = f"{workflow}\0{home.resolve()}"
    return f"{readable}-{hashlib.sha256(identity.encode(errors='surrogateescape')).hexdigest()[:8]}"
