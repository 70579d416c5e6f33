"""Ctrl-C, held back for a moment."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delay_signals() -> Iterator[None]:
    """Do something to its end at Ctrl-C, which comes after it; the second one comes at once.

    What is interrupted in the middle of a transaction leaves it open: a SQLite file stays locked
    while the error is on its way, and nothing can be put right in it.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            before(number, frame)
        pressed = True

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)
