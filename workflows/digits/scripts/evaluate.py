"""Score a model on the validation images."""

import argparse
from pathlib import Path

import joblib
from digitfiles import Images, Score, save_scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--score", type=Path, required=True)
    args = parser.parse_args()

    model = joblib.load(args.model)
    images = Images.load(args.data)
    score = Score(
        C=model.C,
        gamma=model.gamma,
        accuracy=float(model.score(images.pixels, images.digits)),
        support_vectors=len(model.support_),
    )
    save_scores([score], args.score)
    print(f"C={score.C:g} gamma={score.gamma:g}: {score.accuracy:.2%} of {len(images.digits)}")


if __name__ == "__main__":
    main()
