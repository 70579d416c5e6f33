"""Fixtures that several rooms' tests share."""

import signal

# A shell has what it starts in the background ignore Ctrl-C, and so all that is started from there.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = [
    "tests.support.sandbox",
    "tests.support.unicorex",
    "tests.support.benches",
    "tests.support.places",
    "tests.support.s3",
    "tests.support.trial",
    "tests.real.software",
]
