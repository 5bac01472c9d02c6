"""Models of one kind, as others publish them: their config.json, and the names of their tensors."""

from __future__ import annotations

import re
from typing import Any

from framework.config import Config
from framework.layers.stack import Stack
from framework.models.causal_lm import CausalLM
from framework.weights.source import Source

# The tensor of a score head, in all families.
SCORE = {"head/score": Source("score.weight")}


class Family:
    """Models of one kind. Configs are read from and written as config.json; tensors are found by name."""

    # The values of `architectures` in config.json.
    architectures: tuple[str, ...] = ()
    # The sources by our path; that of a layer's parameter begins inside the layer.
    names: dict[str, Source] = {}
    # Published with code of its own (auto_map), which transformers has taken over: nobody needs to run it.
    has_own_code: bool = False
    # A pattern for tensors that hold no weights.
    ignored: str = r"rotary_emb\.inv_freq$"
    # Whether float16 models are read, all as bfloat16. transformers keeps the norms of some families in float32 there.
    takes_float16: bool = True

    def model(self, facts: dict[str, Any]) -> Config:
        """Our model's config. Raises ValueError for a model that we cannot compute."""
        raise NotImplementedError

    def facts(self, model: Config) -> dict[str, Any]:
        """The inverse: config.json of a model of ours, as far as there is one."""
        raise NotImplementedError

    def places(self, model: CausalLM) -> dict[str, list[Source]]:
        """{path of a parameter: its tensors, one for each unit of the stack}.

        Raises:
            ValueError: the family has no such parameter.
        """
        # {stage: (its stack, the number of layers before it)}.
        stacks: dict[str, tuple[Stack, int]] = {"stack": (model.stack, 0)}
        if model.first is not None:
            num_first = model.first.num_units * len(model.first.unit.layers)
            stacks = {"first": (model.first, 0), "stack": (model.stack, num_first)}
        for name, (stack, _) in stacks.items():
            if stack.streams is not None:
                raise ValueError(f"published models have one residual stream; expected model.{name}.streams = one")
        sources = {}
        for path in model.base_specs:
            block = re.fullmatch(r"(first|stack)/block(\d+)/(.+)", path)
            if block:
                stack, num_before = stacks[block[1]]
                name = block[3]
                # A unit may be several layers, its blocks: block b of unit u is layer b + period * u of the stack.
                period = len(stack.unit.layers)
                first_layer = num_before + int(block[2])
                layers = [first_layer + period * unit for unit in range(stack.num_units)]
            else:
                name = path
                layers = [0]
            names = {**self.names, **SCORE}
            if name not in names:
                raise ValueError(f"{type(self).__name__} models have no {path}; they have {', '.join(self.names)}")
            sources[path] = [names[name].of(layer) for layer in layers]
        return sources
