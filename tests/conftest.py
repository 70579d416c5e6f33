"""Fixtures that several rooms' tests share."""

pytest_plugins = [
    "tests.support.sandbox",
    "tests.support.unicorex",
    "tests.support.benches",
    "tests.support.places",
    "tests.support.s3",
    "tests.support.trial",
    "tests.real.software",
]
