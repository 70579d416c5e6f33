"""Train one candidate, and score it by cross-validation."""

import argparse
from pathlib import Path

import joblib
import numpy as np
from candidates import candidate, save
from sklearn.model_selection import cross_val_score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--family", required=True)
    parser.add_argument("--strength", type=float, required=True)
    parser.add_argument("--folds", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--score", type=Path, required=True)
    args = parser.parse_args()

    with np.load(args.data) as arrays:
        x, y = arrays["x"], arrays["y"]
    model = candidate(args.family, args.strength)
    scores = cross_val_score(model, x, y, cv=args.folds)
    joblib.dump(model.fit(x, y), args.model)
    name = args.model.stem
    save(args.score, name=name, accuracy=float(scores.mean()), spread=float(scores.std()))
    print(f"{name}: {scores.mean():.2%} ± {scores.std():.2%}")


if __name__ == "__main__":
    main()
