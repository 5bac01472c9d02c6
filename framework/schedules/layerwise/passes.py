"""Stages and units one after the other: a forward pass and an evaluation by the programs of layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from framework.layout import Nested, flatten
from framework.schedules.layerwise.functions import EvaluationFunctions, Inputs, LayerFunctions, Weights
from framework.schedules.layerwise.programs import Moves, Programs
from framework.schedules.layerwise.storage import STACK
from framework.schedules.step import Metrics

Functions = TypeVar("Functions", bound=LayerFunctions)


class Pass(Generic[Functions]):
    """Some stages and units, one after the other.

    Args:
        functions: what is computed. programs: that compute it. numbers: 0, 1, ... on the devices.
    """

    def __init__(self, functions: Functions, programs: Programs, numbers: list[Any]):
        self.f, self.numbers, self.run = functions, numbers, Moves(programs)
        self.state: Nested = {}
        self.buffers: Nested = {}  # as the microbatch found them, and as it leaves them
        self.new_buffers: Nested = {}
        self.last: tuple[int, Any] = -1, {}  # the unit whose weights are on the device, and those

    def begin(self, buffers: Nested, inputs: Inputs) -> None:
        """A microbatch begins."""
        self.buffers, self.new_buffers, self.inputs = buffers, copied(buffers), inputs

    def weights(self, stage: str, index: int | None = None) -> Weights:
        """A stage's parameters, tied ones included, or those of a unit; where they live."""
        found = {}
        for group in ("parameter", "frozen"):
            own = part(self.state[group], stage, index)
            embed = flatten({"embed": self.state[group].get("embed", {})})
            ties = ((reader.partition("/"), home) for reader, home in self.f.model.ties.items() if home in embed)
            found[group] = {**own, **{key: embed[home] for (name, _, key), home in ties if name == stage}}
        return found

    def unit(self, index: int) -> Weights:
        """A unit's weights on the device; those of the unit before are let go."""
        if self.last[0] != index:
            self.last = -1, {}
            self.last = index, self.run.take(f"weights {index}", self.weights(STACK, index))
        return self.last[1]

    def want_unit(self, index: int) -> None:
        """A unit's weights are to come with the next program."""
        if 0 <= index < self.f.num_units:
            self.run.want(f"weights {index}", self.weights(STACK, index))

    def forward(self, keeps: Callable[[int], str]) -> tuple[Any, list[Any], dict[str, Any]]:
        """(what comes out of the stack; what is kept of each unit; loss and metrics of embedding and stack)."""
        f, run = self.f, self.run
        weights = run.take("embed", self.weights("embed"))
        self.want_unit(0)
        x, entered, buffers = run(
            "enter",
            self.f.enter,
            weights,
            part(self.buffers, "embed"),
            self.inputs,
            out=lambda r: (f.carry_specs(r[0]), *f.everywhere(r[1:])),
        )
        del weights
        self.new_buffers |= {"embed": buffers} if buffers else {}
        self.shared = run.take("shared", self.weights("shared"))
        kept, sums = list[Any](), None
        for index in range(f.num_units):
            x, own, found = self.ahead(index, x, keeps(index), index + 1)
            kept.append(own)
            if jax.tree.leaves(found):
                sums = found if sums is None else run("add", added, sums, found, out=f.everywhere)
        return x, kept, {"embed": entered, STACK: sums or (None, {})}

    def ahead(self, index: int, x: Any, keeps: str, following: int) -> tuple[Any, list[Any], Any]:
        """One unit forward, and the weights of the following one to the device: (y, what is kept, loss and metrics)."""
        f, weights = self.f, self.unit(index)
        self.want_unit(following)
        y, kept, found, buffers = self.run(
            f"ahead {keeps}",
            partial(self.f.ahead, keeps),
            weights,
            self.shared,
            part(self.buffers, STACK, index),
            x,
            self.inputs,
            self.numbers[index],
            donate=(3,),
            out=lambda r: (f.carry_specs(r[0]), f.kept_specs(r[1], keeps), *f.everywhere(r[2:])),
        )
        if buffers and keeps != "now":
            self.new_buffers[STACK][index] = buffers
        return y, kept, found


class Evaluation(Pass[EvaluationFunctions]):
    """The loss of a batch."""

    def __call__(self, weights: Weights, buffers: Nested, batch: Nested) -> Metrics:
        """Sums over the batch."""
        self.state, sums = weights, None
        for number in range(self.f.learner.accumulate):
            self.begin(buffers, (batch, {}, self.numbers[number]))
            x, *_ = self.forward(lambda index: "nothing")
            head = self.run.take("head", self.weights("head"))
            args = head, part(self.buffers, "head"), x, self.inputs
            found = self.run("score", self.f.score, *args, out=self.f.everywhere)
            sums = found if sums is None else self.run("add", added, sums, found, out=self.f.everywhere)
        assert sums is not None
        return sums


def part(tree: Nested, stage: str, index: int | None = None) -> Nested:
    """A stage's or a unit's of a tree by stages; {} for none."""
    found = tree.get(stage, {})
    return found[index] if index is not None and found else found


def copied(tree: Nested) -> Nested:
    """The containers anew, down to the parts of a stack; the arrays are the same."""
    return {key: list(value) if isinstance(value, list) else value for key, value in tree.items()}


def added(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
