"""Split scikit-learn's breast cancer data (569 real diagnoses, shipped with it) into two parts."""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--test-fraction", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    args = parser.parse_args()

    features, benign = load_breast_cancer(return_X_y=True)
    parts = train_test_split(
        features, benign, test_size=args.test_fraction, stratify=benign, random_state=args.seed
    )
    for path, x, y in ((args.train, parts[0], parts[2]), (args.test, parts[1], parts[3])):
        np.savez_compressed(path, x=x, y=y)
        print(f"{path.name}: {len(y)} patients, {np.mean(y):.0%} of them healthy")


if __name__ == "__main__":
    main()
