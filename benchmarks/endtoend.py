"""Trivial rules through the real `snakemake` command, with the executor, without it, and directly.

Prints one line of JSON with seconds.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RULES = 40

SNAKEFILE = """
rule all:
    input: expand("out/{n}.txt", n=range(int(config["rules"])))

rule make:
    output: "out/{n}.txt"
    shell: "echo {wildcards.n} > {output}"
"""


def snakemake(rules: int, *options: str) -> float:
    """Seconds that a fresh run of `rules` rules takes."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "Snakefile").write_text(SNAKEFILE)
        command = [
            sys.executable,
            "-m",
            "snakemake",
            "--quiet",
            "all",
            "--config",
            f"rules={rules}",
        ]
        started = time.monotonic()
        subprocess.run([*command, *options], cwd=directory, check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - started


def direct(rules: int) -> float:
    """Seconds for the same commands as plain processes, two at a time."""
    with tempfile.TemporaryDirectory() as directory:

        def one(number: int) -> None:
            command = f"set -euo pipefail; echo {number} > {number}.txt"
            subprocess.run(["bash", "-c", command], cwd=directory, check=True)

        started = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(one, range(rules)))
        return time.monotonic() - started


def import_seconds() -> float:
    """Seconds that importing the plugin takes beyond Snakemake's interface; the least of five."""
    code = (
        "import time\n"
        "import snakemake_interface_executor_plugins.executors.remote\n"
        "import snakemake_interface_executor_plugins.settings\n"
        "started = time.perf_counter()\n"
        "import snakemake_executor_plugin_mantik\n"
        "print(time.perf_counter() - started)\n"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code]) for _ in range(5)]
    return min(float(seconds) for seconds in runs)


if __name__ == "__main__":
    config = f"{os.environ['MANTIK_SANDBOX_DIR']}/hpc1.yaml"
    mantik = ["--executor", "mantik", "--jobs", "100", "--mantik-backend-config", config]
    figures = {
        "mantik": snakemake(RULES, *mantik),
        "startup": snakemake(1, *mantik),
        "local": snakemake(RULES, "--cores", str(os.cpu_count())),
        "direct": direct(RULES),
    }
    print(json.dumps(figures))
