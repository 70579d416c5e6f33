"""Test the best model and show how it was found, how good it is, and where it errs."""

import argparse
from pathlib import Path

import joblib
import matplotlib as mpl
import numpy as np
from digitfiles import Images, Score, load_scores
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle
from sklearn.metrics import confusion_matrix

SHOWN = 8  # misclassified images at most
INK, FAINT, WRONG, BEST = "#1b2a41", "#8d99ae", "#b3121d", "#ffb000"
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranking", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--figure", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    args = parser.parse_args()

    ranking = load_scores(args.ranking)
    images = Images.load(args.data)
    predicted = joblib.load(args.model).predict(images.pixels)

    mpl.use("Agg")  # a compute node has no display
    with plt.rc_context(STYLE):
        draw(ranking, images, predicted, args.figure)
    args.text.write_text(describe(ranking, images, predicted, args.figure))
    print(f"{args.figure} and {args.text}: {np.mean(predicted == images.digits):.2%} on the test")


def draw(ranking: list[Score], images: Images, predicted: np.ndarray, path: Path) -> None:
    """The whole figure: two panels, and a row of images below them."""
    best = ranking[0]
    right = int(np.sum(predicted == images.digits))
    figure = plt.figure(figsize=(11, 8.4), facecolor="white")
    above, below = figure.subfigures(2, 1, height_ratios=[3.2, 1.15])

    figure.text(0.06, 0.955, "Handwritten digits", fontsize=19, weight="bold")
    figure.text(
        0.06,
        0.922,
        f"The best of {len(ranking)} support vector machines, C = {best.C:g} and "
        f"gamma = {best.gamma:g}, recognises {right} of {len(predicted)} test images "
        f"({100 * right / len(predicted):.1f} %)",
        fontsize=11.5,
    )
    left_axes, right_axes = above.subplots(1, 2, width_ratios=[0.8, 1])
    above.subplots_adjust(left=0.11, right=0.965, top=0.80, bottom=0.09, wspace=0.24)
    draw_grid(left_axes, ranking)
    draw_confusion(right_axes, confusion_matrix(images.digits, predicted))

    wrong = np.flatnonzero(predicted != images.digits)
    shown = wrong[:SHOWN]
    heading = f"Misclassified test images: {len(wrong)}"
    if len(wrong) > SHOWN:
        heading += f", the first {SHOWN} shown"
    below.text(0.06, 0.9, heading, fontsize=12, weight="bold")
    below.text(0.965, 0.9, "true digit → predicted digit", color=FAINT, ha="right")
    row = below.subplots(1, SHOWN, squeeze=False)[0]
    below.subplots_adjust(left=0.06, right=0.965, top=0.7, bottom=0.09, wspace=0.25)
    for axes in row:
        axes.set_axis_off()
    for axes, index in zip(row, shown, strict=False):
        draw_digit(axes, images.pixels[index], images.digits[index], predicted[index])
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_grid(axes: Axes, ranking: list[Score]) -> None:
    """A heat map of the validation accuracy, the best point framed."""
    costs = sorted({score.C for score in ranking})
    gammas = sorted({score.gamma for score in ranking})
    percent = np.full((len(gammas), len(costs)), np.nan)
    for score in ranking:
        percent[gammas.index(score.gamma), costs.index(score.C)] = 100 * score.accuracy

    # Errors, not accuracies, tell good models apart: hence a logarithmic scale of them.
    errors = np.clip(100 - percent, 0.1, None)
    axes.imshow(
        errors, cmap="YlGnBu_r", norm=LogNorm(errors.min(), errors.max() * 2), aspect="auto"
    )
    threshold = np.sqrt(errors.min() * errors.max() * 2)
    for (row, column), value in np.ndenumerate(percent):
        axes.text(
            column,
            row,
            f"{value:.1f} %",
            ha="center",
            va="center",
            fontsize=13,
            color="white" if errors[row, column] < threshold else INK,
        )
    draw_cell_borders(axes, percent.shape, "white", 3)
    corner = costs.index(ranking[0].C) - 0.5, gammas.index(ranking[0].gamma) - 0.5
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, ec=BEST, lw=4, zorder=3, clip_on=False))
    axes.set_xticks(range(len(costs)), [f"{cost:g}" for cost in costs])
    axes.set_yticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
    axes.set(xlabel="C", ylabel="gamma", title="Validation accuracy (frame: the best)")
    axes.spines[:].set_visible(False)


def draw_confusion(axes: Axes, counts: np.ndarray) -> None:
    """The confusion matrix: what is right in one colour, what is wrong in another."""
    on_diagonal = np.eye(len(counts), dtype=bool)
    for mask, colours in ((on_diagonal, "Blues"), (~on_diagonal & (counts > 0), "Reds")):
        shades = np.ma.masked_where(~mask, counts / counts[mask].max(initial=1))
        axes.imshow(shades, cmap=colours, vmin=-0.4, vmax=1.25)
        for row, column in np.argwhere(mask):
            axes.text(
                column,
                row,
                f"{counts[row, column]}",
                ha="center",
                va="center",
                color="white" if shades[row, column] > 0.5 else INK,
            )
    axes.set_xticks(range(len(counts)))
    axes.set_yticks(range(len(counts)))
    draw_cell_borders(axes, counts.shape, "#e4e8ee", 0.8)
    axes.set(xlabel="predicted digit", ylabel="true digit", title="Best model on the test images")
    axes.spines[:].set_visible(False)


def draw_cell_borders(axes: Axes, shape: tuple[int, ...], colour: str, width: float) -> None:
    """Lines between the cells of a matrix of this shape, drawn as its minor grid."""
    rows, columns = shape
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color=colour, linewidth=width)
    axes.tick_params(which="minor", length=0)


def draw_digit(axes: Axes, pixels: np.ndarray, digit: int, predicted: int) -> None:
    """One misclassified image, with what it shows and what the model saw in it."""
    axes.imshow(pixels.reshape(8, 8), cmap="Greys", vmin=0, vmax=1)
    axes.set_title(f"{digit} → {predicted}", loc="center", fontsize=13, color=WRONG, pad=6)
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[])


def describe(ranking: list[Score], images: Images, predicted: np.ndarray, figure: Path) -> str:
    """The report as Markdown."""
    best = ranking[0]
    right = int(np.sum(predicted == images.digits))
    rows = [
        f"| {place} | {score.C:g} | {score.gamma:g} | {score.accuracy:.2%} "
        f"| {score.support_vectors} |"
        for place, score in enumerate(ranking, start=1)
    ]
    return "\n".join(
        [
            "# Handwritten digits",
            "",
            f"Best model: support vector machine with C = {best.C:g} and gamma = {best.gamma:g}.",
            "",
            f"Test accuracy: **{right / len(predicted):.2%}** "
            f"({right} of {len(predicted)} images that had no say in training or choosing it).",
            "",
            f"![Accuracy, confusion matrix and errors]({figure.name})",
            "",
            "| place | C | gamma | validation accuracy | support vectors |",
            "| ---: | ---: | ---: | ---: | ---: |",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
