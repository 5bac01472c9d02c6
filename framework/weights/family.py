"""Families of published models: how to read and write their config.json and the names of their tensors."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from plimsoll.framework.config import Config
from plimsoll.framework.layers.base import Layer
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.weights.source import Source

# The tensor of a score head, the same in all families.
SCORE = {"head/score": Source("score.weight")}


class ModelFamily:
    """A family of published models. It converts configs from and to config.json, and finds tensors by name."""

    # {value of `architectures` in config.json: its `model_type`, by which transformers chooses the class}
    architectures: dict[str, str] = {}
    # {value of `architectures` of a model that reads images too: that of its language model, which is all that is read}
    multimodal: dict[str, str] = {}
    # {value of `architectures` of a model that scores sequences: that of its language model}
    scored: dict[str, str] = {}
    # Sources by our parameter path; the path of a layer's parameter is relative to the layer.
    names: dict[str, Source] = {}
    # Whether such models were published with their own code (auto_map). transformers has since adopted it, so that code
    # never needs to run.
    has_custom_code: bool = False
    # Pattern for tensors that hold no weights.
    ignored: str = r"rotary_emb\.inv_freq$"
    # Whether float16 models may be read, as bfloat16. For some families transformers keeps the norms in float32 then.
    takes_float16: bool = True

    def model(self, facts: dict[str, Any]) -> Config:
        """Return our model's config. Raise ValueError for a model that we do not support."""
        raise NotImplementedError

    def facts(self, model: Config) -> dict[str, Any]:
        """Return config.json for one of our models, the inverse of `model`, as far as the family can express it."""
        raise NotImplementedError

    def find_source(self, name: str, layer: Layer | None) -> Source | None:
        """Return the tensor of a parameter; None if the family has no such parameter.

        Args:
            name: path of the parameter; in a layer, its path there.
            layer: the layer; None for parameters outside of the stacks.
        """
        return {**self.names, **SCORE}.get(name)

    def match_names(self, places: dict[str, list[Source]], names: Collection[str]) -> dict[str, list[Source]]:
        """Return the result of `places` with the names of a directory, if the family has several forms of them.

        Args:
            places: sources of each parameter.
            names: names of all tensors of the directory.
        """
        return places

    def places(self, model: CausalLM) -> dict[str, list[Source]]:
        """Return {path of a parameter: its tensors, one for each repeat of the stack's pattern}.

        Raises:
            ValueError: the family has no such parameter.
        """
        # {stage: (its stack, number of layers before it)}
        stacks: dict[str, tuple[Stack, int]] = {"stack": (model.stack, 0)}
        if model.first is not None:
            num_first = model.first.num_repeats * len(model.first.pattern.layers)
            stacks = {"first": (model.first, 0), "stack": (model.stack, num_first)}
        for name, (stack, _) in stacks.items():
            if stack.streams is not None:
                raise ValueError(f"published models have one residual stream; expected model.{name}.streams = one")
        sources = {}
        for path in model.base_specs:
            block = re.fullmatch(r"(first|stack)/block(\d+)/(.+)", path)
            layer = None
            if block:
                stack, num_before = stacks[block[1]]
                name = block[3]
                # A pattern may have several layers (blocks): block b of repeat r is layer b + period * r of the stack.
                period = len(stack.pattern.layers)
                first_layer = num_before + int(block[2])
                numbers = [first_layer + period * repeat for repeat in range(stack.num_repeats)]
                layer = stack.pattern.layers[f"block{block[2]}"]
            else:
                name = path
                numbers = [0]
            source = self.find_source(name, layer)
            if source is None:
                raise ValueError(f"{type(self).__name__} models have no {path}; they have {', '.join(self.names)}")
            sources[path] = [source.for_layer(number) for number in numbers]
        return sources
