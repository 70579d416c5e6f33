"""Rank the tested models in a table."""

import argparse
from pathlib import Path

from candidates import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scores", type=Path, nargs="+", required=True)
    args = parser.parse_args()

    scores = sorted(map(load, args.scores), key=lambda score: (-score["accuracy"], score["name"]))
    lines = ["| model | accuracy | tumours found |", "| --- | ---: | ---: |"]
    lines += [f"| {s['name']} | {s['accuracy']:.2%} | {s['sensitivity']:.2%} |" for s in scores]
    args.out.write_text("\n".join(lines) + "\n")
    print(args.out.read_text(), end="")


if __name__ == "__main__":
    main()
