"""Fixtures that several rooms' tests share."""

import signal

from hypothesis import HealthCheck, settings

# A shell has what it starts in the background ignore Ctrl-C, and so all that is started from there.
signal.signal(signal.SIGINT, signal.default_int_handler)
# However long an example may take on a busy machine, nothing follows from that.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

pytest_plugins = [
    "tests.support.sandbox",
    "tests.support.unicorex",
    "tests.support.benches",
    "tests.support.places",
    "tests.support.s3",
    "tests.support.trial",
    "tests.real.centre.fixtures",
    "tests.real.software",
    "tests.real.centre.fixtures",
]
