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
