"""The families of models, and the files that the entry points hand to each other."""

import json
from pathlib import Path

from sklearn.base import BaseEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC


def candidate(family: str, strength: float) -> BaseEstimator:
    """A model that is not trained yet; `strength` says how closely it may follow the data."""
    models = {
        "logistic": lambda: LogisticRegression(C=strength, max_iter=5000),
        "svm": lambda: SVC(C=strength),
        "neighbours": lambda: KNeighborsClassifier(n_neighbors=max(1, round(20 / strength))),
    }
    if family not in models:
        raise SystemExit(f"there is no family {family!r}; there are {', '.join(models)}")
    return make_pipeline(StandardScaler(), models[family]())


def save(path: Path, **told: object) -> None:
    path.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


def load(path: Path) -> dict:
    return json.loads(path.read_text())
