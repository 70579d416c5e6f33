"""`benchmark:` files: the same columns as Snakemake's local ones, for what ran at the site."""

import csv
import json

from tests.support.workflows import Project

SNAKEFILE = r"""
    rule all:
        input: "once.txt", "thrice.txt"

    rule once:
        output: "once.txt"
        benchmark: "bench/deep/once.tsv"
        shell:
            # On a busy machine it takes a while until it is looked at for the first time.
            "sleep 1.2; "
            "[ ! -d .mantik ] || until find .mantik | grep -q /sample; do sleep 0.1; done; "
            "echo once > {output}"

    rule thrice:
        output: "thrice.txt"
        benchmark: repeat("bench/thrice {bench}.jsonl", 3)
        shell: "echo {bench_iteration} {rule} > {output}"

    rule failing:
        output: "failing.txt"
        benchmark: "bench/failing.tsv"
        shell: "exit 3"
"""


def test_benchmark_files(project: Project) -> None:
    project.write("Snakefile", SNAKEFILE.replace("{bench}", "ü"))
    twin = project.twin()
    twin.run(local=True).ok()
    project.run("all", "failing.txt", "--keep-going", "--benchmark-extended").failed()
    assert not project.exists("bench/failing.tsv")

    ours, theirs = (
        list(csv.DictReader(p.read("bench/deep/once.tsv").splitlines(), delimiter="\t"))
        for p in (project, twin)
    )
    assert set(theirs[0]) < set(ours[0])
    assert ours[0]["rule_name"] == "once"
    assert 1.2 <= float(ours[0]["s"]) < 60
    assert ours[0]["max_rss"] != "NA"
    records = [json.loads(line) for line in project.read("bench/thrice ü.jsonl").splitlines()]
    assert [record["rule_name"] for record in records] == ["thrice"] * 3
    assert project.read("thrice.txt") == twin.read("thrice.txt") == "2 thrice\n"
    assert list((project.directory / ".snakemake/mantik/benchmarks").iterdir()) == []


def test_a_later_rule_reads_one_at_its_site(project: Project) -> None:
    """It is written here: the later job is submitted once, after that, and not ahead.

    One that only looks at it finds it, too.
    """
    project.write(
        "Snakefile",
        """
        rule sum:
            input: a="a.txt", b="bench/a.tsv"
            output: "sum.txt"
            shell: "head -1 {input.b} > {output}"

        rule looks:
            input: "a.txt"
            output: "c.txt"
            shell: "head -1 bench/a.tsv | cmp - <(printf 's\\th:m:s\\tmax_rss\\tmax_vms\\tmax_uss"
                "\\tmax_pss\\tio_in\\tio_out\\tmean_load\\tcpu_time\\n') && touch {output}"

        rule one:
            output: "a.txt"
            benchmark: "bench/a.tsv"
            shell: "echo a > {output}"
        """,
    )

    said = project.run("sum.txt", "c.txt").ok().output

    assert project.read("sum.txt").startswith("s\th:m:s\t")
    assert "sum: waits for" not in said
    assert len(project.attempts) == 3, said
