"""Run a centre until it is ended: `python -m tests.real.centre DIRECTORY`.

`DIRECTORY/told.json` appears when all servers answer, with what clients must know of them.
"""

import json
import os
import shutil
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from tests.real.centre import USER, Centre, firecrest
from tests.real.slurm import Slurm


def main(directory: Path) -> None:
    """Start everything in `directory`, report it and wait for SIGTERM."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    centre = Centre(directory)
    centre.scratch.mkdir(parents=True)
    shutil.chown(centre.scratch, USER, USER)
    with ExitStack() as servers:
        (directory / "slurm").mkdir()
        servers.enter_context(Slurm(directory / "slurm", nodes=("n1", "n2"), users=(USER,)))
        os.environ.update(centre.environment)
        told: dict[str, object] = {"directory": str(directory)}
        told["firecrest"] = servers.enter_context(firecrest.serve(centre)).told()
        file = directory / "told.json"
        file.with_suffix(".new").write_text(json.dumps(told))
        file.with_suffix(".new").rename(file)
        over.wait()
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
