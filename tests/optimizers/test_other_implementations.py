"""Optimizers compared to other implementations: torchao's 8-bit AdamW, the authors' adam-mini and AdaLomo (lomo-optim).

The tests use the results recorded by tools/record_optimizers.py, and run live if the packages are installed
(`make test-peers`). lomo-optim needs a GPU only to store its moments, so the moments are left on the CPU.
"""

import importlib
import importlib.util
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll.framework.layout.bit_packing import unpack
from plimsoll.framework.optimizers.quantized import encode
from tools.peers import optimizer_cases as cases

LIVE = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(params=["recorded", pytest.param("live", marks=LIVE)])
def theirs(request: pytest.FixtureRequest) -> Any:
    """Return a function from a case's name to the other implementation's results."""
    if request.param == "recorded":
        return lambda name: dict(np.load(cases.FOLDER / f"{name}.npz"))
    missing = [one for one in ("torchao", "adam_mini", "lomo_optim") if importlib.util.find_spec(one) is None]
    if missing:
        refuse = pytest.fail if request.config.option.markexpr == "peers" else pytest.skip
        refuse(f"not installed: {', '.join(missing)}; they come with: pip install -e '.[peers]'")
    return importlib.import_module("tools.peers.optimizers").compute


@pytest.mark.first(1)
@pytest.mark.parametrize("name", cases.CASES)
def test_parameters_after_training(name, theirs):
    expected, (actual, _) = theirs(name), cases.ours(name)
    assert actual.keys() == cases.CASES[name].keys()
    for key, value in actual.items():
        moved = np.abs(expected[key] - cases.first(name)[key]).max()
        assert moved > 0.02
        errors = np.abs(value - expected[key]) / moved
        # Two of the 10240 numbers are halfway between two codes, and the implementations round them differently.
        assert np.mean(errors > 2e-5) <= (3e-4 if name == "adamw8bit" else 0), key
        assert errors.max() < 1e-2, key


def test_moments_in_8_bits(theirs):
    expected, (_, state) = theirs("adamw8bit"), cases.ours("adamw8bit")
    for part, moment in (("mu", state[0].mu["mlp.weight"]), ("nu", state[0].nu["mlp.weight"])):
        codes = np.asarray(unpack(moment.codes, rows=512)).T.astype(int)
        different = codes != expected[f"{part}/codes"]
        # A number halfway between two codes, up to its last bit, is rounded up by one side and down by the other.
        assert different.mean() < 1e-3
        assert np.abs(codes - expected[f"{part}/codes"]).max() <= 1
        np.testing.assert_allclose(np.asarray(moment.scale).T.ravel(), expected[f"{part}/scale"], rtol=1e-5)


@pytest.mark.pairs
@pytest.mark.parametrize("signed", [True, False])
def test_codes(signed, theirs):
    """The codes are the same, except that our nonzero second moments never become zero."""
    expected, x = theirs("adamw8bit"), cases.make_quantization_inputs(signed=signed)
    codes, theirs_too = np.asarray(encode(jnp.asarray(x), signed=signed)), expected[f"codes/{signed}"]
    assert len(np.unique(theirs_too)) > 200
    zeros = np.zeros(x.shape, bool) if signed else (theirs_too == 0) & (x > 0)
    assert zeros.any() == (not signed)
    assert (codes[zeros] == 1).all()
    np.testing.assert_array_equal(codes[~zeros], theirs_too[~zeros])
    table = np.asarray(encode(jnp.asarray(expected[f"map/{signed}"]), signed=signed))
    np.testing.assert_array_equal(table, np.arange(256))


def test_recorded_file_covers_all_cases():
    about = json.loads((cases.FOLDER / "recorded.json").read_text())
    assert about["versions"].keys() == {"torch", "torchao", "adam_mini", "lomo-optim"}
    assert {file.stem for file in cases.FOLDER.glob("*.npz")} == cases.CASES.keys()
    for file in cases.FOLDER.glob("*.npz"):
        assert file.stat().st_size < 100_000, file.name
