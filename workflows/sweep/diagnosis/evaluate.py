"""Test one model on patients that had no say in its training or its choice."""

import argparse
from pathlib import Path

import joblib
import numpy as np
from candidates import save
from sklearn.metrics import accuracy_score, recall_score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    with np.load(args.data) as arrays:
        x, y = arrays["x"], arrays["y"]
    found = joblib.load(args.model).predict(x)
    save(
        args.out,
        name=args.model.stem,
        accuracy=float(accuracy_score(y, found)),
        sensitivity=float(recall_score(y, found, pos_label=0)),
    )
    print(f"{args.model.stem}: {accuracy_score(y, found):.2%}")


if __name__ == "__main__":
    main()
