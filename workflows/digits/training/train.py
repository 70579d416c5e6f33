"""Train a support vector machine with one pair of hyper-parameters.

Where MLflow has started a run for it (the variable MLFLOW_RUN_ID), metrics go into that run.
"""

import argparse
import os
import time
from pathlib import Path

import joblib
import numpy as np
from sklearn.svm import SVC


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--C", type=float, required=True)
    parser.add_argument("--gamma", type=float, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()

    with np.load(args.data) as arrays:
        pixels, digits = arrays["pixels"], arrays["digits"]
    begun = time.perf_counter()
    model = SVC(kernel="rbf", C=args.C, gamma=args.gamma).fit(pixels, digits)
    metrics = {
        "train_seconds": time.perf_counter() - begun,
        "train_accuracy": float(model.score(pixels, digits)),
        "support_vectors": len(model.support_),
    }
    joblib.dump(model, args.model)
    print(
        f"C={args.C:g} gamma={args.gamma:g}: trained on {len(digits)} images, "
        f"of which {len(model.support_)} became support vectors"
    )
    if "MLFLOW_RUN_ID" in os.environ:
        import mlflow

        with mlflow.start_run():
            mlflow.log_metrics(metrics)


if __name__ == "__main__":
    main()
