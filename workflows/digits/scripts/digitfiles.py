"""The files that the scripts of this workflow hand to each other."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Images:
    """Images of handwritten digits.

    Attributes:
        pixels: one row of 64 grey values (8 x 8) per image, from 0 (white) to 1 (black).
        digits: the digit that each image shows.
    """

    pixels: np.ndarray
    digits: np.ndarray

    def save(self, path: Path) -> None:
        np.savez_compressed(path, pixels=self.pixels, digits=self.digits)

    @classmethod
    def load(cls, path: Path) -> "Images":
        with np.load(path) as arrays:
            return cls(arrays["pixels"], arrays["digits"])


@dataclass(frozen=True)
class Score:
    """How well the model of one point of the grid did on the validation images.

    Attributes:
        C, gamma: the point of the grid.
        accuracy: fraction of the images that the model named rightly.
        support_vectors: number of training images that the model remembers.
    """

    C: float
    gamma: float
    accuracy: float
    support_vectors: int


def save_scores(scores: list[Score], path: Path) -> None:
    path.write_text(json.dumps([asdict(score) for score in scores], indent=2) + "\n")


def load_scores(path: Path) -> list[Score]:
    return [Score(**entry) for entry in json.loads(path.read_text())]
