"""Remembers at which sites a full job found no fitting Snakemake, so that the next run tells first.

What is remembered belongs to an environment: with another image, module or Python in the backend
config, or another Snakemake here, it is looked for again. `smk-mantik bootstrap` looks again, too.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from snakemake import __version__

from snakemake_executor_plugin_mantik.common.errors import UserError, WorkflowNotRunnable, printable
from snakemake_executor_plugin_mantik.rules import Job, resources
from snakemake_executor_plugin_mantik.rules.onsite.full_job import LACK
from snakemake_executor_plugin_mantik.rules.payload import why_full_job

_NAME = "lacks.json"
"""The file's name in our own directory."""


class MissingSnakemake:
    """What full jobs lacked, by site."""

    def __init__(self, state: Path, environments: Mapping[str, str]) -> None:
        """Read what is known.

        Args:
            state: our own local directory.
            environments: the environment of each site, as text.
        """
        self._path = state / _NAME
        self._environments = {
            name: hashlib.sha256(f"{__version__}\0{text}".encode()).hexdigest()[:16]
            for name, text in environments.items()
        }
        try:
            self._known: dict[str, dict[str, str]] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            self._known = {}  # a job will tell it again

    def refuse(self, jobs: Iterable[Job]) -> None:
        """See to it that no full job goes where one found no Snakemake.

        Raises:
            WorkflowNotRunnable: some would; with what the last one said.
        """
        rules: dict[str, dict[str, None]] = {}
        for job in jobs:
            if why_full_job(job) is None:
                continue
            try:
                given, _ = resources.split_undetermined(resources.given_resources(job))
                site = resources.choose_site(given, self._environments)
            except UserError:
                continue  # told with all that is wrong with resources
            if self._lack(site):
                rules.setdefault(site, {})[job.rule.name] = None
        if rules:
            raise WorkflowNotRunnable(
                "nothing submitted: "
                + "; ".join(
                    f"rule{'s' * (len(names) > 1)} {', '.join(names)} cannot run at {site}, where"
                    f" the last such job said: {self._lack(site)}"
                    for site, names in rules.items()
                ),
                do="If you have put it there since, smk-mantik bootstrap SITE looks again",
            )

    def _lack(self, site: str) -> str:
        known = self._known.get(site, {})
        same = known.get("environment") == self._environments[site]
        return known.get("said", "") if same else ""

    def note(self, site: str, log: Path) -> None:
        """Remember what a job that failed said, if it found no Snakemake."""
        try:
            lines = log.read_text(errors="replace").splitlines()
        except OSError:
            return
        for line in lines:
            # In a group a member's name stands before it.
            _, found, more = line.partition(LACK)
            if found:
                said = printable(f"{LACK}{more}".removeprefix("mantik:").strip())
                self._known[site] = {"environment": self._environments[site], "said": said}
                self._write()
                return

    def forget(self, site: str) -> None:
        """A Snakemake is there now."""
        if self._known.pop(site, None) is not None:
            self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._known))
        os.replace(new, self._path)
