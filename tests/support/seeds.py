"""Which seeds a test plays: its own few, or those that a variable asks for."""

import os


def seeds(own: int, variable: str = "MANTIK_SEEDS", *, number: str = "") -> range:
    """The seeds to play.

    Args:
        own: how many there are if nothing else is asked for.
        variable: names some, as in `17-17` or `200-299`.
        number: the variable that says how many.
    """
    if chosen := os.environ.get(variable, ""):
        first, _, last = chosen.partition("-")
        return range(int(first), int(last or first) + 1)
    return range(int(os.environ.get(number, own)))
