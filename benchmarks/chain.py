"""Trivial rules one after the other at a centre, beside plain sbatch with dependencies.

`python -m benchmarks.chain {unicore,firecrest} [LINKS]` prints the seconds for each link: plain
`sbatch --dependency` on the same Slurm, the executor with jobs that are presubmitted, and
without. See benchmarks/centre.py for what it needs.
"""

import argparse
import os
import subprocess

from rich.table import Table

from benchmarks.centre import CONSOLE, WAIT_S, centre, executor, until_all_ended
from tests.real.centre import USER, Centre

LINKS = 12
SNAKEFILE = """
rule all:
    input: f"out/{config['rules'] - 1}.txt"

rule first:
    output: "out/0.txt"
    shell: "echo 0 > {output}"

rule link:
    input: lambda wildcards: f"out/{int(wildcards.n) - 1}.txt"
    output: "out/{n}.txt"
    wildcard_constraints: n="[1-9][0-9]*"
    shell: "cat {input} > {output}; echo {wildcards.n} >> {output}"
"""


def sbatch(site: Centre, links: int) -> float:
    """Seconds that a chain of so many jobs takes that the user submits at once."""
    one = "sbatch --parsable --output=/dev/null --wrap true"
    loop = f"id=$({one}); for n in $(seq 2 {links}); do id=$({one} --dependency=afterany:$id); done"
    with until_all_ended(site, links) as seconds:
        subprocess.run(
            ["bash", "-c", loop], check=True, user=USER, cwd=site.scratch, timeout=WAIT_S,
            env={**os.environ, **site.environment},
        )  # fmt: skip
    return seconds[0]


def _row(table: Table, what: str, single: float, chain: float, links: int) -> None:
    each = (chain - single) / (links - 1)
    table.add_row(what, f"{chain:.1f}", f"{single:.1f}", f"{each:.2f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chain")
    parser.add_argument("api", choices=("unicore", "firecrest"))
    parser.add_argument("links", type=int, nargs="?", default=LINKS)
    arguments = parser.parse_args()
    with centre(arguments.api) as server:
        site, links = Centre(server.directory), arguments.links
        table = Table("what", "a chain", "a single job", "each further link",
                      title=f"{links} trivial jobs one after the other, seconds")  # fmt: skip
        alone = ("--mantik-presubmit", "0")
        for what, options in (("executor", ()), ("executor, --mantik-presubmit 0", alone)):
            single, chain = (executor(server, n, SNAKEFILE, *options)["all"] for n in (1, links))
            _row(table, what, single, chain, links)
        _row(table, "plain sbatch --dependency", sbatch(site, 1), sbatch(site, links), links)
        CONSOLE.print(table)


if __name__ == "__main__":
    main()
