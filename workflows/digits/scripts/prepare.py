"""Split scikit-learn's digits (shipped with it) into training, validation and test images."""

import argparse
from pathlib import Path

from digitfiles import Images
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

DARKEST = 16  # the data set counts dark pixels in 4 x 4 blocks of the scanned image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--validation-fraction", type=float, required=True)
    parser.add_argument("--test-fraction", type=float, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    args = parser.parse_args()

    pixels, digits = load_digits(return_X_y=True)
    everything = Images(pixels / DARKEST, digits)
    rest, test = split(everything, args.test_fraction, args.seed)
    train, validation = split(rest, args.validation_fraction / (1 - args.test_fraction), args.seed)

    parts = {args.train: train, args.validation: validation, args.test: test}
    for path, part in parts.items():
        part.save(path)
        print(f"{path}: {len(part.digits)} images")


def split(images: Images, fraction: float, seed: int) -> tuple[Images, Images]:
    """Draw `fraction` of the images; returns those that stay and those that were drawn."""
    stay_pixels, drawn_pixels, stay_digits, drawn_digits = train_test_split(
        images.pixels,
        images.digits,
        test_size=fraction,
        stratify=images.digits,
        random_state=seed,
    )
    return Images(stay_pixels, stay_digits), Images(drawn_pixels, drawn_digits)


if __name__ == "__main__":
    main()
