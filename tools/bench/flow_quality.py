"""Quality of a trained flow: bits per dimension against Gaussians, and a two-sample test of samples against images.

    python -m tools.bench.flow_quality --workdir=runs/digits-glow

Bits per dimension are those of the discrete images, bounded by the density of x + u with u uniform in [0, 1) (Theis et
al. 2016, arXiv 1511.01844), on the run's first validation set, for several draws of u. The Gaussians are fitted to the
run's training images with the same u, whose mean (1/2) and variance (1/12) are known. The two-sample test is the
leave-one-out accuracy of a nearest-neighbor classifier (Lopez-Paz and Oquab 2017, arXiv 1610.06545) between held-out
images and as many others, by Euclidean distance of pixels: 50% if the sets are indistinguishable, less if the others
are copies of held-out images, 100% if the sets are separable.
"""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import version
from typing import Any

import numpy as np

from plimsoll.framework.terminal.tables import TableSection, render
from plimsoll.launch import cli, weights


def nearest_neighbour(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float]:
    """Return how often an image's nearest other image belongs to the same set: over all images, `ours` and `theirs`.

    Both sets have the shape [N, ...].
    """
    points = np.concatenate([ours, theirs]).reshape(len(ours) + len(theirs), -1).astype(np.float64)
    squares = (points**2).sum(1)
    distances = squares[:, None] + squares - 2.0 * points @ points.T
    np.fill_diagonal(distances, np.inf)
    of_ours = np.arange(len(points)) < len(ours)
    right = of_ours[distances.argmin(1)] == of_ours
    return right.mean(), right[: len(ours)].mean(), right[len(ours) :].mean()


def gaussian_bits(train: np.ndarray, held: np.ndarray, *, full: bool) -> float:
    """Return the bits per dimension of dequantized images under a Gaussian.

    Args:
        train: integer images to fit the Gaussian to.
        held: dequantized held-out images, real numbers [N, ...].
        full: fit the full covariance; otherwise pixels are independent.
    """
    flat = train.reshape(len(train), -1).astype(np.float64) + 0.5
    covariance = np.cov(flat, rowvar=False, bias=True) + np.eye(flat.shape[1]) / 12.0
    root = np.linalg.cholesky(covariance if full else np.diag(np.diag(covariance)))
    z = np.linalg.solve(root, (held.reshape(len(held), -1) - flat.mean(0)).T)
    nats = 0.5 * (z**2).sum(0).mean() + np.log(np.diag(root)).sum() + 0.5 * len(root) * np.log(2 * np.pi)
    return float(nats / len(root) / np.log(2.0))


def flow_bits(loaded: weights.LoadedModel, held: np.ndarray, draw: np.random.Generator) -> float:
    """Return the model's bits per dimension. Its noise depends on an image's row, so images are shuffled over rows."""
    data, program, totals = loaded.experiment.data, loaded.program, dict[str, float]()
    order, size = draw.permutation(len(held)), data.global_batch_size
    for start in range(0, len(held), size):
        chosen = np.resize(order[start : start + size], size)
        counted = (np.arange(size) < len(held) - start).astype(np.float32)
        batch = program.put({"images": held[chosen], "weights": counted})
        for name, value in program.evaluate(loaded.state, batch, averaged=loaded.averaged).items():
            totals[name] = totals.get(name, 0.0) + value.item()
    return loaded.experiment.model.summary(totals)["bits_per_dim"]


def _spread(values: list[Any], unit: str = "") -> str:
    scale = 100.0 if unit == "%" else 1.0
    digits = 1 if unit == "%" else 3
    return f"{scale * np.mean(values):.{digits}f}{unit} (± {scale * np.std(values):.{digits}f})"


@cli.main
def main(argv: list[str]) -> int:
    """Print the tables and return 0."""
    parser = weights.parser("flow_quality", __doc__, hf=False)
    parser.add_argument(
        "--draws", type=int, default=8, metavar="N", help="number of draws of noise and of samples; default 8"
    )
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[1.0], help="temperatures of the samples; default 1"
    )
    args, overrides = weights.parse(parser, argv)
    if args.draws < 1:
        raise cli.UsageError(f"--draws={args.draws}: expected at least 1")

    from plimsoll.extras.flows.image_sampler import ImageSampler

    loaded = weights.load(args, overrides, text=False)
    images, data = ImageSampler(loaded.program, loaded.state, averaged=loaded.averaged), loaded.experiment.data
    data.setup(loaded.folder)
    if not data.validation_names:
        raise ValueError("data.validation has no set to evaluate on")
    train, held = data.images["train"], data.images[data.validation_names[0]]
    if len(train) < len(held):
        raise ValueError(f"{len(held)} held-out images, but only {len(train)} training images to compare them with")
    count, draw, draws = len(held), np.random.default_rng(0), range(args.draws)
    bits: dict[str, list[float]] = {name: [] for name in ("Gaussian, per pixel", "Gaussian, full covariance", "flow")}
    for _ in draws:
        noisy = held + draw.random(held.shape)
        for name, full in zip(bits, (False, True), strict=False):
            bits[name].append(gaussian_bits(train, noisy, full=full))
        bits["flow"].append(flow_bits(loaded, held, draw))
    others = {"training images": [train[draw.permutation(len(train))[:count]] for _ in draws]}
    for heat in args.temperature:
        drawn = images.sample(args.draws * count, heat, 0)
        others[f"samples, temperature {heat:g}"] = [*drawn.reshape(args.draws, count, *held.shape[1:])]
    noise = draw.integers(0, data.levels, (args.draws, *held.shape))
    others["uniform noise"] = [*noise]
    found = {name: [nearest_neighbour(held, other) for other in sets] for name, sets in others.items()}
    parts = [[name, *(_spread([one[i] for one in rows], "%") for i in range(3))] for name, rows in found.items()]
    sizes = f"{count} held-out images, {len(train)} for training, {args.draws} draws (mean ± standard deviation)"
    packages = ("jax", "jaxlib", "numpy", "scikit-learn")
    about = [
        ["workdir", f"{args.workdir}{', averaged' if loaded.averaged else ''}"],
        ["images", sizes],
        ["command", shlex.join(["python", "-m", "tools.bench.flow_quality", *argv])],
        ["versions", ", ".join(f"{name} {version(name)}" for name in packages)],
    ]
    tables = [
        TableSection("bits per dimension", [[name, _spread(values)] for name, values in bits.items()]),
        TableSection(
            "nearest neighbor is in the same set", [["compared with", "all", "held-out", "the others"], *parts]
        ),
        TableSection("about", about),
    ]
    print(render(tables), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
