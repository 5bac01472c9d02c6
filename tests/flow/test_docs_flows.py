"""docs/flows.md: its example layer runs as written, inside a flow, and its table of configs has the right numbers."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plimsoll import configs
from plimsoll.extras.flows.linear import ActNorm
from plimsoll.extras.flows.model import Flow
from plimsoll.framework.config import config_for
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import initialize
from tools import golden

TEXT = (Path(__file__).parents[2] / "docs" / "flows.md").read_text()


@pytest.mark.pairs
def test_docs_layer_example_works():
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    space: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "docs/flows.md", "exec", dont_inherit=True), space)
    pattern = [config_for(ActNorm), config_for(space["LeakyReLU"], slope=0.7)]
    model = Flow(image_shape=(4, 4, 1), levels=5, stacks=[config_for(Stack, num_layers=4, pattern=pattern)])
    params = initialize(model.parameter_specs(), jax.random.key(0))
    images = jnp.asarray(np.random.default_rng(0).integers(0, 5, (2, 4, 4, 1)), jnp.uint8)
    np.testing.assert_array_equal(model.quantize(model.decode(params, model.encode(params, images))), images)
    layer, x = space["LeakyReLU"](slope=0.7), jax.random.normal(jax.random.key(1), (1, 2, 2, 1))
    jacobian = jax.jacobian(lambda x: layer.forward({}, x.reshape(1, 2, 2, 1), Context(batch={}))[0].reshape(4))
    dense = np.linalg.slogdet(jacobian(x.reshape(4)))[1]
    np.testing.assert_allclose(layer.forward({}, x, Context(batch={}))[1][0], dense, rtol=1e-5)


def test_docs_config_table_is_correct():
    rows = re.findall(r"\| `([\w-]+)` \|[^|]*\| ([\d.]+)M \|", TEXT)
    assert {name for name, _ in rows} == {name for name in configs.names() if name.startswith(("digits", "images"))}
    for name, millions in rows:
        count = golden.load_golden()[name]["parameters"] / 1e6
        assert round(count, len(millions.partition(".")[2])) == float(millions)
