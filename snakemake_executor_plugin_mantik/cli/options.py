"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Workdir = Annotated[
    Path,
    typer.Option(
        "--directory",
        "-d",
        exists=True,
        file_okay=False,
        help="The workflow's working directory.",
    ),
]
"""The working directory of a workflow that has run."""

Sites = Annotated[
    list[str] | None,
    typer.Option(
        "--site",
        metavar="[NAME=]FILE",
        help="A site's backend config, if it has moved since the last run; repeatable.",
    ),
]
"""The current paths of the backend configs of a workflow that has run."""

Segments = Annotated[
    int | None,
    typer.Option(
        "--continue",
        min=0,
        metavar="SEGMENTS",
        help="Go on past the walltime, in up to so many jobs, from --checkpoint.",
    ),
]
"""How many segments a run may have."""

Checkpoint = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="What the next job goes on from: a file, or with a trailing / a folder; several are"
        " separated by blanks.",
    ),
]
"""What the segments of a run go on from."""
