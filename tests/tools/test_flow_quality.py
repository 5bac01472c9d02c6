"""The measures of tools.bench.flow_quality: controls, analytical results, and a run of two steps."""

from pathlib import Path

import numpy as np
import pytest

from plimsoll.extras.flows.image_source import DigitsSource
from plimsoll.launch import train
from tests.support import runs
from tools.bench import flow_quality

FILE = str(Path(__file__).parents[1] / "support/tiny_images.py")


def split() -> tuple[np.ndarray, np.ndarray]:
    return DigitsSource(split="train").load(), DigitsSource(split="validation").load()


def test_two_sample_test_separates_noise_but_not_digits():
    digits, held = split()
    draw = np.random.default_rng(0)
    others = [digits[draw.permutation(len(digits))[: len(held)]] for _ in range(4)]
    same = np.mean([flow_quality.nearest_neighbour(held, other)[0] for other in others])
    assert 0.44 < same < 0.56
    for noise in (
        draw.integers(0, 17, held.shape),
        draw.permuted(held.reshape(len(held), -1), axis=1).reshape(held.shape),
    ):
        assert flow_quality.nearest_neighbour(held, noise)[0] > 0.9
    assert flow_quality.nearest_neighbour(held, held)[0] == 0.0  # copies are detected, too


def test_the_two_sample_test_by_hand():
    ours, theirs = np.array([[0.0], [1.0], [5.0]]), np.array([[5.5], [20.0], [21.0]])
    assert flow_quality.nearest_neighbour(ours, theirs) == (4 / 6, 2 / 3, 2 / 3)


@pytest.mark.parametrize("full", [False, True])
def test_gaussians_match_scipy(full: bool):
    # Every worker collects this file, but only one runs this test, and the import takes 0.9 s.
    from scipy import stats

    images = np.random.default_rng(1).integers(0, 9, (500, 2, 3, 1))
    images[:, 1] += images[:, :1, :, :].sum(1)  # correlated
    noisy = images[:100] + np.random.default_rng(2).random((100, 2, 3, 1))
    flat = images.reshape(500, 6)
    covariance = np.cov(flat.T, bias=True) + np.eye(6) / 12
    covariance = covariance if full else np.diag(np.diag(covariance))
    gaussian = stats.multivariate_normal(flat.mean(0) + 0.5, covariance)
    expected = -gaussian.logpdf(noisy.reshape(100, 6)).mean() / 6 / np.log(2)
    assert flow_quality.gaussian_bits(images, noisy, full=full) == pytest.approx(expected, rel=1e-12)


@pytest.mark.pairs
def test_gaussian_fit_is_optimal_for_dequantized_images():
    digits, _ = split()
    noisy = np.concatenate([digits + np.random.default_rng(seed).random(digits.shape) for seed in range(4)])
    assert 3.3 < flow_quality.gaussian_bits(digits, noisy, full=False) < 3.5
    assert 2.8 < flow_quality.gaussian_bits(digits, noisy, full=True) < 3.0
    for worse in (digits + 0.2, digits * 1.05):
        for full in (False, True):
            best = flow_quality.gaussian_bits(digits, noisy, full=full)
            assert flow_quality.gaussian_bits(worse, noisy, full=full) > best


@pytest.mark.pairs
def test_a_run_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    workdir = tmp_path / "run"
    assert train.main([f"--config={FILE}:flow", f"--workdir={workdir}", "--config.trainer.max_steps=2"]) == 0
    (row,) = (row for row in runs.rows(workdir) if "eval/digits/bits_per_dim" in row)
    capsys.readouterr()
    assert flow_quality.main([f"--workdir={workdir}", "--draws=2", "--temperature", "1.0", "0.7"]) == 0
    lines = [line.split("   ") for line in capsys.readouterr().out.splitlines()]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    assert float(cells["flow"][0].split()[0]) == pytest.approx(row["eval/digits/bits_per_dim"], abs=0.01)
    assert 3.3 < float(cells["Gaussian, per pixel"][0].split()[0]) < 3.5
    assert cells["compared with"] == ["all", "held-out", "the others"]
    share = {
        name: float(cells[name][0].split("%")[0]) for name in cells if len(cells[name]) == 3 and name != "compared with"
    }
    assert 40 < share["training images"] < 60
    assert share["uniform noise"] > 97
    assert share["samples, temperature 1"] > 60
    assert share["samples, temperature 1"] != share["samples, temperature 0.7"]
