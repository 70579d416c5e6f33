"""The demo: runs this pipeline's rules as jobs at a sandbox site behind UNICORE's REST API.

`make demo` starts it. Snakemake runs here; every rule runs as a job at the site `hpc1`, to which it
is sent through HTTP, and what it makes comes back. The site is a server of this machine that speaks
UNICORE's REST API; with another backend config the same command runs at a real centre.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from snakemake_executor_plugin_mantik.cli.jobs import table
from snakemake_executor_plugin_mantik.journal import history

HERE = Path(__file__).resolve().parent
SITE = "hpc1"
SANDBOX = HERE / ".sandbox"
CONFIG = HERE / ".sandbox" / "digits" / f"{SITE}.yaml"
INSIDE = "--inside"
SHOWN = Path("results")

console = Console()


def main() -> int:
    """Start the sandbox around this script's second half and pass its exit code on."""
    if INSIDE in sys.argv[1:]:
        return inside()
    environment = os.environ | {"MANTIK_SANDBOX_DIR": str(SANDBOX)}
    command = ["-m", "snakemake_executor_plugin_mantik", "sandbox", "run"]
    site = ["--site", f"{SITE}=unicore", "--", sys.executable, __file__, INSIDE]
    return subprocess.run(
        [sys.executable, *command, *site], env=environment, check=False
    ).returncode


def inside() -> int:
    """Run the pipeline at the sandbox's site and show what came of it."""
    write_config()
    command = [
        *("snakemake", "--executor", "mantik", "--jobs", "8"),
        *("--mantik-backend-config", str(CONFIG.relative_to(HERE))),
        *("--rerun-incomplete", "--nolock", "--quiet", "rules", "host"),
    ]
    console.print(f"[bold]$ {shlex.join(command)}[/bold]  (in {HERE.relative_to(Path.cwd())})")
    started = time.time()
    code = subprocess.run([sys.executable, "-m", *command], cwd=HERE, check=False).returncode
    if code == 0:
        show(started)
    return code


def write_config() -> None:
    """Write the site's backend config: the sandbox's, with the environment that the jobs need."""
    sandbox = (SANDBOX / f"{SITE}.yaml").read_text()
    CONFIG.parent.mkdir(parents=True, exist_ok=True)
    CONFIG.write_text(f"{sandbox}\nEnvironment:\n  Python: {json.dumps(sys.prefix)}\n")


def show(started: float) -> None:
    """Show the jobs of this run, the best model, and where the figure is."""
    records = [r for r in history(HERE / ".snakemake" / "mantik") if r.created >= started]
    console.print()
    if records:
        console.print(table(records))
    else:
        console.print("Everything was there already: no job was sent.")
    console.print()
    lines = (HERE / SHOWN / "report.md").read_text().splitlines()
    console.print(Markdown("\n".join(line for line in lines if not line.startswith("!["))))
    console.print(f"\nFigure: {(HERE / SHOWN / 'report.png').relative_to(Path.cwd())}")


if __name__ == "__main__":
    sys.exit(main())
