"""Remember sites where a full job found no fitting Snakemake, so that the next run refuses early.

A record belongs to an environment. If the backend config's environment (image, modules, Python,
variables, hooks) or the Snakemake on this machine changes, it does not count. `smk-mantik
bootstrap` removes it, and so does a full job that succeeds.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from snakemake import __version__

from snakemake_executor_plugin_mantik.common.errors import UserError, WorkflowNotRunnable, printable

from .. import Job, resources
from ..make_request import why_full_job
from ..onsite.full_job import LACK

_NAME = "lacks.json"
"""Name of the file in the executor's directory."""


class MissingSnakemake:
    """Records, by site, the message of a full job that found no fitting Snakemake."""

    def __init__(self, state: Path, environments: Mapping[str, str]) -> None:
        """Read the records. `environments` has the environment of each site as text."""
        self._path = state / _NAME
        self._environments = {
            name: hashlib.sha256(f"{__version__}\0{text}".encode()).hexdigest()[:16]
            for name, text in environments.items()
        }
        try:
            self._known: dict[str, dict[str, str]] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            self._known = {}  # the next full job will report the lack again

    def refuse(self, jobs: Iterable[Job]) -> None:
        """Refuse full jobs at sites where an earlier one found no fitting Snakemake.

        Raises:
            WorkflowNotRunnable: there are such jobs. Quotes the message of the last one.
        """
        rules: dict[str, dict[str, None]] = {}
        for job in jobs:
            if why_full_job(job) is None:
                continue
            try:
                given, _ = resources.split_undetermined(resources.given_resources(job))
                site = resources.choose_site(given, self._environments)
                if given.get(resources.ENVIRONMENT_RESOURCE) is not None:
                    continue  # the records are about `Environment`
            except UserError:
                continue  # reported with all other mistakes in resources
            if self._lack(site):
                rules.setdefault(site, {})[job.rule.name] = None
        if rules:
            raise WorkflowNotRunnable(
                "nothing submitted: "
                + "; ".join(
                    f"{'rule' if len(names) == 1 else 'rules'} {', '.join(names)} cannot run at"
                    f" {site}, where the last such job reported: {self._lack(site)}"
                    for site, names in rules.items()
                ),
                do="If you have installed it since, run smk-mantik bootstrap SITE to check again",
            )

    def _lack(self, site: str) -> str:
        known = self._known.get(site, {})
        same = known.get("environment") == self._environments[site]
        return known.get("said", "") if same else ""

    def note(self, site: str, log: Path) -> None:
        """Record the message of a failed job if it found no fitting Snakemake."""
        try:
            lines = log.read_text(errors="replace").splitlines()
        except OSError:
            return
        for line in lines:
            # In a group the member's name precedes the message.
            _, found, more = line.partition(LACK)
            if found:
                message = printable(f"{LACK}{more}".removeprefix("mantik:").strip())
                self._known[site] = {"environment": self._environments[site], "said": message}
                self._write()
                return

    def forget(self, site: str) -> None:
        """Remove the record of a site that has a Snakemake now."""
        if self._known.pop(site, None) is not None:
            self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._known))
        os.replace(new, self._path)
