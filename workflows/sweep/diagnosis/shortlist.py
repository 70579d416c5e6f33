"""Name the best candidates, one a line."""

import argparse
from pathlib import Path

from candidates import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scores", type=Path, nargs="+", required=True)
    args = parser.parse_args()

    scores = sorted(map(load, args.scores), key=lambda score: (-score["accuracy"], score["name"]))
    best = [score["name"] for score in scores[: args.keep]]
    args.out.write_text("".join(f"{name}\n" for name in best))
    print(f"kept {', '.join(best)} of {len(scores)}")


if __name__ == "__main__":
    main()
