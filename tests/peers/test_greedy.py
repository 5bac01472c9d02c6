"""Greedy generation compared to transformers token by token, with and without its cache, unpadded and padded."""

import jax
import pytest

from plimsoll.framework.inference.generation import Generator
from plimsoll.framework.inference.sampling import Sampling
from plimsoll.framework.layout import TrainState
from tools.peers import ours
from tools.peers.families import FAMILIES

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
]
PROMPTS, NEW = [[5, 17, 80, 3, 3, 41, 9], [60, 2], [7, 7, 90, 33, 12, 11, 55, 1, 64, 20, 21, 22, 23]], 16


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy(name: str, theirs) -> None:
    import torch

    family = FAMILIES[name]
    model = theirs.build(family, 7).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], **options: bool) -> list[list[int]]:
        length = max(map(len, prompts))
        tokens = torch.tensor([[0] * (length - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompts])
        with torch.no_grad():
            out = model.generate(
                tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
            )
        return out[:, length:].tolist()

    program = ours.build_program(ours.experiment(family))
    weights = theirs.get_weights(model)
    params = jax.device_put(ours.parameters(family, program.experiment.model, weights), program.replicated)
    state = TrainState(parameter=params)
    got = Generator(program, state)(PROMPTS, Sampling(NEW))
    assert got == [generate([prompt], use_cache=False)[0] for prompt in PROMPTS]
    assert got == [generate([prompt], use_cache=True)[0] for prompt in PROMPTS]
    assert got == generate(PROMPTS, use_cache=True)
    assert len({token for row in got for token in row}) > 5, "nearly constant output shows little"
