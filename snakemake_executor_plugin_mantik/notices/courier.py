"""Deliver notices in the background."""

import threading
import time
from collections.abc import Callable
from typing import Final

from snakemake_executor_plugin_mantik.notices.notice import Notice
from snakemake_executor_plugin_mantik.notices.targets import (
    COMMAND_WAIT_S,
    NotDeliveredError,
    Target,
)

LONGEST_WAIT_S: Final = COMMAND_WAIT_S + 2.0
"""Most seconds that the end of a run waits for a notice to be delivered."""


class Courier:
    """Delivers notices to a target, each in a thread of its own, so that nothing waits for them."""

    def __init__(self, target: Target, warn: Callable[[str], None]) -> None:
        """Prepare; `warn` writes a line to the user's log."""
        self._target = target
        self._warn = warn
        self._threads: list[threading.Thread] = []

    def send(self, notice: Notice) -> None:
        """Begin to deliver a notice; one that cannot be delivered is reported in the log."""
        thread = threading.Thread(
            target=self._deliver, args=(notice,), name="mantik-notice", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def wait(self, seconds: float = LONGEST_WAIT_S) -> None:
        """Wait until all notices are delivered or given up, so many seconds at most."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _deliver(self, notice: Notice) -> None:
        try:
            self._target.deliver(notice)
        except NotDeliveredError as error:
            self._warn(f"A notice ({notice.title}) could not be delivered: {error}.")
        except Exception as error:  # noqa: BLE001 - a bug of ours is no reason for a run to fail
            # Its words may contain the address.
            self._warn(
                f"A notice ({notice.title}) could not be delivered because of a bug in the"
                f" executor ({type(error).__name__})."
            )
