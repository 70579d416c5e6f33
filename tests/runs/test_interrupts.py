"""Ctrl-C while something is done that is not to be left half done."""

import os
import signal

import pytest

from snakemake_executor_plugin_mantik.runs.submit import delay_signals


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_comes_afterwards_and_the_second_one_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - where it comes is what is looked at
        with delay_signals():
            press()
            done.append("first")
        done.append("after it")
    with pytest.raises(KeyboardInterrupt), delay_signals():  # noqa: PT012
        press()
        press()
        done.append("second")
    assert done == ["first"]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_is_told_before_ctrl_c() -> None:
    with pytest.raises(ValueError, match="wrong"), delay_signals():  # noqa: PT012
        press()
        raise ValueError("wrong")
    with delay_signals():
        pass
