"""Options that several commands have."""

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
"""The directory of a workflow that has run."""

Sites = Annotated[
    list[str] | None,
    typer.Option(
        "--site",
        metavar="[NAME=]FILE",
        help="A site's backend config, if it is not where the last run had it; repeatable.",
    ),
]
"""Where the backend configs of a workflow that has run are now."""
