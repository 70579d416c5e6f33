"""Define what all parts of the engine share of a workflow."""

import os
import platform
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..journal import AttemptRecord, Journal
from ..sites.base import Site
from .site_retry import SiteRetry
from .transfer_meter import TransferMeter


@dataclass(frozen=True)
class WorkflowContext:
    """What the work at all sites and places of a workflow shares.

    Attributes:
        state: our own local directory: files in transfer, logs.
        notify: writes a line to the user's log.
        give_up: ends attempts, at whatever site of this run, and makes certain that they never run;
            attempts at other sites are left behind there, with a message.
        meter: measures the transfers.
    """

    journal: Journal
    workdir: Path
    state: Path
    notify: Callable[[str], None]
    give_up: Callable[[Sequence[AttemptRecord]], Awaitable[None]]
    meter: TransferMeter = field(default_factory=TransferMeter)

    @property
    def logs(self) -> Path:
        """Return the directory of the jobs' logs."""
        return self.state / "logs"

    @property
    def about(self) -> str:
        """Describe this controller to people, here and in leases: directory, host and process."""
        since = time.strftime("%Y-%m-%d %H:%M %Z")
        return f"{self.workdir} on {platform.node()}, process {os.getpid()}, since {since}"


@dataclass(frozen=True)
class PlaceContext:
    """What all parts of the work at one place share.

    Attributes:
        id: its identity.
        site: a site that sees it.
        retry: repeats requests there.
    """

    id: str
    site: Site
    retry: SiteRetry
    workflow: WorkflowContext
