#!/usr/bin/env python3
"""Writes down all that it is told."""

import pickle
import tempfile
from dataclasses import dataclass
from multiprocessing import Pool


@dataclass
class Point:
    x: int


def double(number):
    return 2 * number


def say(*values):
    print(*values, file=out)


if __name__ == "__main__":
    with open(snakemake.output[0], "w") as out:
        for name in ("input", "output", "params", "wildcards", "log"):
            items = getattr(snakemake, name)
            say(name, str(items), len(items), list(items)[:2], sorted(items.keys()))
            for key, value in items.items():
                say(name, key, type(value).__name__, str(value), getattr(items, key) is not None)
        say(snakemake.input.named, snakemake.input["named"], snakemake.input[-1])
        say(snakemake.input.several[0], snakemake.input.get("none", "default"))
        say([type(each).__name__ for each in snakemake.input[:2]])
        say(snakemake.params.table["path"].parent)
        say(snakemake.params.sort, snakemake.params.get("index"), snakemake.params[0])
        say(snakemake.params.inputs.named, snakemake.params.inputs[1])
        say(snakemake.threads, snakemake.rule, snakemake.bench_iteration, snakemake.config)
        say({k: v for k, v in snakemake.resources.items() if k != "tmpdir"})
        say(snakemake.resources.tmpdir == tempfile.gettempdir())
        say(pickle.loads(pickle.dumps(Point(3))), pickle.loads(pickle.dumps(snakemake.log)).err)
        say(__name__, snakemake.scriptdir.endswith("/scripts"))
        say(__file__.endswith("/scripts/tell.py"), __real_file__ != __file__)
        say(hash(snakemake.wildcards) == hash(tuple(snakemake.wildcards)))
        try:
            snakemake.input.sort()
        except AttributeError:
            say("no sorting")
        with Pool(2) as pool:
            say(pool.map(double, range(3)))
