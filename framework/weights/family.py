"""Models of one kind, as others publish them: their config.json, and the names of their tensors."""

from __future__ import annotations

import re
from typing import Any

from framework.config import Config
from framework.models.causal_lm import CausalLM
from framework.weights.source import Source


class Family:
    """Models of one kind. Configs are read from and written as config.json; tensors are found by name."""

    # The values of `architectures` in config.json.
    architectures: tuple[str, ...] = ()
    # The sources by our path; that of a layer's parameter begins inside the layer.
    names: dict[str, Source] = {}
    # A pattern for tensors that hold no weights.
    ignored: str = r"rotary_emb\.inv_freq$"
    # Whether directories that name code of their own (auto_map) compute what transformers' own class does.
    has_code_in_transformers: bool = False

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
        if model.stack.streams is not None:
            raise ValueError("published models have one residual stream; expected model.stack.streams = one")
        # A unit of the stack may be several layers, its blocks: block b of unit u is layer b + period * u.
        period = len(model.stack.unit.layers)
        sources = {}
        for path in model.base_specs:
            block = re.fullmatch(r"stack/block(\d+)/(.+)", path)
            if block:
                name = block[2]
                layers = [int(block[1]) + period * unit for unit in range(model.stack.num_units)]
            else:
                name = path
                layers = [0]
            if name not in self.names:
                raise ValueError(f"{type(self).__name__} models have no {path}; they have {', '.join(self.names)}")
            sources[path] = [self.names[name].of(layer) for layer in layers]
        return sources
