"""Train a support vector machine with one pair of hyper-parameters."""

import argparse
from pathlib import Path

import joblib
from digitfiles import Images
from sklearn.svm import SVC


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--C", type=float, required=True)
    parser.add_argument("--gamma", type=float, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()

    images = Images.load(args.data)
    model = SVC(kernel="rbf", C=args.C, gamma=args.gamma).fit(images.pixels, images.digits)
    joblib.dump(model, args.model)
    print(
        f"C={args.C:g} gamma={args.gamma:g}: trained on {len(images.digits)} images, "
        f"of which {len(model.support_)} became support vectors"
    )


if __name__ == "__main__":
    main()
