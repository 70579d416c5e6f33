"""The demo: runs this pipeline's rules as jobs at two sandbox sites behind REST APIs.

`make demo` starts it. Snakemake runs here; rules run as jobs at `hpc1`, behind UNICORE's REST API,
but training, which runs at `hpc2`, behind firecREST's. Jobs are submitted over HTTP, and what they
make comes back and goes where it is needed next. Each training is an MLflow run. The sites are
servers of this machine that speak those APIs; with other backend configs the same command runs at
real centres.
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
from rich.table import Table

from snakemake_executor_plugin_mantik.cli.watch import jobs_table
from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.journal import read_history
from snakemake_executor_plugin_mantik.staging.project_files import REPORT_FILE
from snakemake_executor_plugin_mantik.views.workflow import overview_jobs

HERE = Path(__file__).resolve().parent
SITES = {"hpc1": "unicore", "hpc2": "firecrest"}
SANDBOX = HERE / ".sandbox"
CONFIGS = SANDBOX / "digits"
ELSEWHERE = "train:mantik_site=hpc2"
INSIDE = "--inside"
SHOWN = Path("results")
TRACKING = f"sqlite:///{HERE / 'mlflow.db'}"
METRICS = {"train_accuracy": "Accuracy", "support_vectors": "Vectors", "train_seconds": "Fitting"}

console = Console()


def main() -> int:
    """Start the sandbox around this script's second half and pass its exit code on."""
    if INSIDE in sys.argv[1:]:
        return inside()
    # The demo's runs stay here, whatever MLflow server is used otherwise.
    environment = {n: v for n, v in os.environ.items() if not n.startswith("MLFLOW_")}
    environment |= {"MANTIK_SANDBOX_DIR": str(SANDBOX), "MLFLOW_TRACKING_URI": TRACKING}
    command = ["-m", "snakemake_executor_plugin_mantik", "sandbox", "run"]
    sites = [word for name, api in SITES.items() for word in ("--site", f"{name}={api}")]
    second_half = [*sites, "--", sys.executable, __file__, INSIDE]
    return subprocess.run(
        [sys.executable, *command, *second_half], env=environment, check=False
    ).returncode


def inside() -> int:
    """Run the pipeline at the sandbox's site and show what came of it."""
    configs = [str(write_config(name).relative_to(HERE)) for name in SITES]
    command = [
        *("snakemake", "--executor", "mantik", "--jobs", "8", "--set-resources", ELSEWHERE),
        *("--mantik-backend-config", *configs),
        *("--rerun-incomplete", "--nolock", "--quiet", "rules", "host"),
    ]
    console.print(
        "19 jobs at two sandbox sites on this machine: eight trainings at hpc2, behind firecREST's"
        " API, the rest at hpc1, behind UNICORE's. This takes about a minute."
    )
    console.print(f"[bold]$ {shlex.join(command)}[/bold]  (in {HERE.relative_to(Path.cwd())})")
    started = time.time()
    code = subprocess.run([sys.executable, "-m", *command], cwd=HERE, check=False).returncode
    if code == 0:
        show(started)
    return code


def show_links(experiment: str) -> None:
    """Write the report of the run; show where it, the figure and the MLflow runs are."""
    report = HERE / REPORT_FILE
    words = ["report", "--directory", str(HERE), "--output", str(report)]
    command = [sys.executable, "-m", "snakemake_executor_plugin_mantik", *words]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    here = Path.cwd()
    program = Path(sys.executable).with_name("mlflow")
    mlflow = program.relative_to(here) if program.is_relative_to(here) else "mlflow"
    store = f"sqlite:///{(HERE / 'mlflow.db').relative_to(here)}"
    console.print("\n[bold]To look at in a browser[/bold]")
    for what, where in (
        ("The pipeline, its timeline, and what the jobs used", report.as_uri()),
        ("The scores of the models", (HERE / SHOWN / "report.png").as_uri()),
        (
            f"The runs in MLflow, after [bold]{mlflow} ui --backend-store-uri {store}[/bold]",
            f"http://127.0.0.1:5000/#/experiments/{experiment}/runs",
        ),
    ):
        console.print(f"  {what}:", soft_wrap=True, highlight=False)
        console.print(f"    {where}", soft_wrap=True)


def write_config(site: str) -> Path:
    """Write a site's backend config: the sandbox's, with the environment that the jobs need."""
    sandbox = (SANDBOX / f"{site}.yaml").read_text()
    CONFIGS.mkdir(parents=True, exist_ok=True)
    config = CONFIGS / f"{site}.yaml"
    config.write_text(f"{sandbox}\nEnvironment:\n  Python: {json.dumps(sys.prefix)}\n")
    return config


def show(started: float) -> None:
    """Show the jobs of this run, the best model, and where the figure is."""
    records = [r for r in read_history(HERE / ".snakemake" / "mantik") if r.created >= started]
    console.print()
    if records:
        console.print(
            jobs_table(overview_jobs(records, controlled=False), time.time(), console.width)
        )
    else:
        console.print("Everything was there already: no job was submitted.")
    console.print()
    lines = (HERE / SHOWN / "report.md").read_text().splitlines()
    console.print(Markdown("\n".join(line for line in lines if not line.startswith("!["))))
    show_links(show_runs())


def show_runs() -> str:
    """Show the MLflow runs; return the id of their experiment."""
    # Here, since it takes seconds.
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=TRACKING)
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    found = Table("Run", "Status", "Site", "C", "gamma", *METRICS.values(), title="MLflow runs")
    # The jobs' runs; the workflow's own run is above them.
    wanted = "tags.`mantik.attempt_id` != ''"
    experiment = ""
    for run in client.search_runs(ids, wanted, order_by=["metrics.train_accuracy DESC"]):
        experiment = run.info.experiment_id
        params, metrics = run.data.params, run.data.metrics
        values = [f"{metrics[name]:.4g}" if name in metrics else "" for name in METRICS]
        tags = run.data.tags
        found.add_row(
            run.info.run_id[:8], run.info.status, tags.get("mantik.site", ""),
            params.get("C", ""), params.get("gamma", ""), *values,
        )  # fmt: skip
    console.print(found)
    return experiment


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MantikError as error:
        sys.exit(str(error))
