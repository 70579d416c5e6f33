"""Rank the models by their scores and copy the best one."""

import argparse
import shutil
from pathlib import Path

from digitfiles import Score, load_scores, save_scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scores", type=Path, nargs="+", required=True)
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="in the same order")
    parser.add_argument("--ranking", type=Path, required=True)
    parser.add_argument("--best", type=Path, required=True)
    args = parser.parse_args()

    model_of = {
        load_scores(score)[0]: model for score, model in zip(args.scores, args.models, strict=True)
    }
    ranking = sorted(model_of, key=merit)
    save_scores(ranking, args.ranking)
    shutil.copyfile(model_of[ranking[0]], args.best)
    for score in ranking:
        print(f"{score.accuracy:.2%}  C={score.C:g} gamma={score.gamma:g}")


def merit(score: Score) -> tuple[float, int, float, float]:
    """Accuracy first; among equals the model that remembers the fewest images."""
    return -score.accuracy, score.support_vectors, score.C, score.gamma


if __name__ == "__main__":
    main()
