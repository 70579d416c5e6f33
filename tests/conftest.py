"""Fixtures that several rooms' tests share."""

pytest_plugins = ["tests.support.unicorex"]
