"""Run a centre until it is ended: `python -m tests.real.centre DIRECTORY`.

`DIRECTORY/told.json` appears when all servers answer, with what clients must know of them. The
directory is removed at the end.
"""

import json
import os
import shutil
import signal
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.real.centre import USER, Centre
from tests.real.centre.firecrest import firecrest
from tests.real.centre.tsi import unicore
from tests.real.slurm import Slurm
from tests.support.shared import Told


def main(directory: Path) -> None:
    """Start everything in `directory`, report it and wait for SIGTERM."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    centre = Centre(directory)
    centre.scratch.mkdir(parents=True)
    shutil.chown(centre.scratch, USER, USER)
    with ExitStack() as servers:
        servers.callback(partial(shutil.rmtree, directory, ignore_errors=True))
        (directory / "slurm").mkdir()
        slurm = Slurm(directory / "slurm", nodes=("n1", "n2"), users=(USER,), fragile="n3")
        servers.enter_context(slurm)
        os.environ.update(centre.environment)
        told: Told = {"directory": str(directory)}
        pair = servers.enter_context(unicore(centre, directory / "unicore", centre.scratch))
        told["unicorex"] = pair.server.to_json()
        told["firecrest"] = servers.enter_context(firecrest(centre)).to_json()
        report = directory / "told.json"
        report.with_suffix(".new").write_text(json.dumps(told))
        report.with_suffix(".new").rename(report)
        over.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
