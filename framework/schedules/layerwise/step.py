"""A training step by the programs of layers: forward, backward, and the update."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from framework.layout import Nested
from framework.learner.units import chosen
from framework.schedules.layerwise.functions import LayerFunctions
from framework.schedules.layerwise.passes import Pass, copied, part
from framework.schedules.layerwise.storage import STACK
from framework.schedules.step import Metrics, State


class Step(Pass[LayerFunctions]):
    """One step on its way."""

    def __call__(self, state: State, batch: Nested) -> tuple[State, Metrics]:
        """The whole step."""
        f, run = self.f, self.run
        self.state = {group: copied(tree) for group, tree in state.items()}
        del state
        self.at_once = f.memory.gradients == "none"
        self.gradients: dict[str, Any] = {}  # of stages and units that wait
        self.on_their_way: set[str] = set()  # of these, to the host
        self.going: list[tuple[str, int | None]] = []  # what was updated
        total: Any = None
        size = f.group_size
        every = "nothing" if f.inverts else "all"
        keeps = (lambda index: every) if size == 1 else (lambda index: "nothing" if index % size else "input")
        buffers = self.state["buffer"]
        for number in range(f.learner.accumulate):
            self.begin(buffers, (batch, self.state["counter"], self.numbers[number]))
            x, kept, parts = self.forward(keeps)
            if f.inverts:
                kept[-1] = jax.tree.leaves(x)
            run.want(f"kept {f.num_units - size}", kept[-size])
            ct, waiting, parts["head"] = self.turn(x)
            del x
            buffers = self.new_buffers
            total = run("total", self.f.total, parts, total, out=f.everywhere)
            if number + 1 < f.learner.accumulate:
                self.backward(kept, ct, waiting, None, None)
        zero = run("zero", jnp.zeros_like, total["loss"], out=f.everywhere)
        if self.at_once and f.learner.clip_mode == "two_pass":
            _, tally = self.decide(total, zero)
            tally = self.backward(kept, ct, waiting, tally, None, measures=True)
            zero = tally["squares"]
        decision, tally = self.decide(total, zero)
        tally = self.backward(kept, ct, waiting, tally, decision if self.at_once else None)
        if not self.at_once:
            decision, _ = self.decide(total, tally["squares"])
            self.update_all(decision)
        return self.finished(decision, total, tally)

    def decide(self, total: Nested, squares: Any) -> Any:
        """(the decision, a tally to begin with)."""
        return self.run("decide", self.f.decide, total["loss"], squares, self.state["counter"], out=self.f.everywhere)

    # --- backward ----------------------------------------------------------------------------------------------------

    def turn(self, x: Any) -> tuple[Any, Any, Any]:
        """The head, forward and backward: (cotangent, gradients of ties, loss and metrics)."""
        f, run = self.f, self.run
        weights, before = run.take("head", self.weights("head")), self.waiting("head")
        ct, grads, waiting, found, buffers = run(
            "turn",
            self.f.turn,
            weights,
            part(self.buffers, "head"),
            x,
            before,
            self.inputs,
            donate=(3,) if f.inverts else (2, 3),
            out=lambda r: (
                f.carry_specs(r[0]),
                f.gradient_specs("head", r[1]),
                f.gradient_specs("embed", r[2]),
                *f.everywhere(r[3:]),
            ),
        )
        self.new_buffers |= {"head": buffers} if buffers else {}
        self.head = grads
        return ct, waiting, found

    def backward(
        self, kept: list[Any], ct: Any, waiting: Any, tally: Any, decision: Any, *, measures: bool = False
    ) -> Any:
        """From the head to the embedding; returns the tally.

        Args:
            kept, ct, waiting: of the forward pass and the head.
            tally: of squares; None while there are more microbatches to come.
            decision: updates are done at once by this one; None: gradients wait.
            measures: nothing but the tally is changed, as all is needed again.
        """
        run, size = self.run, self.f.group_size
        if self.head:
            if tally is not None:
                tally = run("judge", self.f.judged, tally, self.head, out=self.f.everywhere)
            self.visit("head", None, self.head, tally, decision, measures)
            self.head = self.head if measures else {}
        if measures:
            ct = run("copy", _copies, ct, out=self.f.carry_specs)
        sums: Nested = {}
        found = kept[-1]  # the output of the unit whose turn it is, where that is found from the one after it
        for first in range(self.f.num_units - size, -1, -size):
            inner = (
                [found] if self.f.inverts else [kept[first]] if size == 1 else self.again(first, kept[first], measures)
            )
            if not measures:
                kept[first] = None
            for index in range(first + size - 1, first - 1, -1):
                if index == first and first and not self.f.inverts:
                    run.want(f"kept {first - size}", kept[first - size])
                own = inner.pop() if size > 1 or not measures else inner[0]
                ct, grads, sums, tally, found = self.back(index, own, ct, sums, tally, decision, measures)
                del own
                self.visit(STACK, index, grads, tally, decision, measures)
                del grads
        if sums:
            before = self.waiting("shared")
            shardings = partial(self.f.gradient_specs, "shared")
            # The result takes the place of the sum before it; without one, of the gradients, if these are of its dtype.
            alone = (0,) if self.f.learner.accumulate == 1 else ()
            donated = alone if before is None else (1,)
            sums = run("sum", partial(self.f.added, "shared"), sums, before, donate=donated, out=shardings)
            if tally is not None:
                tally = run("judge", self.f.judged, tally, sums, out=self.f.everywhere)
            self.visit("shared", None, sums, tally, decision, measures)
            del sums
        return self.left(ct, waiting, tally, decision, measures)

    def again(self, first: int, kept: list[Any], measures: bool) -> list[Any]:
        """What the backward pass of a group of units needs, by a forward pass from its input."""
        (x,), size, inner = self.run.take(f"kept {first}", kept), self.f.group_size, list[Any]()
        if measures:
            x = self.run("copy", _copies, x, out=self.f.carry_specs)
        for index in range(first, first + size):
            x, own, _ = self.ahead(index, x, "now", index + 1 if index + 1 < first + size else -1)
            inner.append(own)
        return inner

    def back(
        self, index: int, kept: list[Any], ct: Any, sums: Any, tally: Any, decision: Any, measures: bool
    ) -> tuple[Any, Nested, Any, Any, list[Any]]:
        """A unit backward: see `LayerFunctions.back`."""
        f, run, weights = self.f, self.run, self.unit(index)
        kept, key = run.take(f"kept {index}", kept), f"gradient {STACK} {index}"
        before = run.take(key, self.placed(key)) if key in self.gradients else None
        self.want_unit(index - 1)
        if decision is not None:
            run.want(f"state {index}", self.kept_state(STACK, index))
        if (following := f"gradient {STACK} {index - 1}") in self.gradients and not measures:
            run.want(following, self.placed(following))
        return run(
            "back measured" if measures else "back",
            self.f.back,
            weights,
            self.shared,
            part(self.buffers, STACK, index),
            kept,
            ct,
            sums,
            before,
            tally,
            self.inputs,
            self.numbers[index],
            donate=(4, 5) if measures else (3, 4, 5, 6) if f.inverts else (4, 5, 6),
            out=lambda r: (
                f.carry_specs(r[0]),
                f.gradient_specs(STACK, r[1]),
                f.gradient_specs("shared", r[2]),
                f.everywhere(r[3]),
                f.carry_specs(r[4]),
            ),
        )

    def left(self, ct: Any, waiting: Any, tally: Any, decision: Any, measures: bool) -> Any:
        """The embedding backward; the tally."""
        weights, before = self.run.take("embed", self.weights("embed")), self.waiting("embed")
        if not weights["parameter"]:
            return tally
        grads, tally = self.run(
            "leave",
            self.f.leave,
            weights,
            part(self.buffers, "embed"),
            ct,
            waiting,
            before,
            tally,
            self.inputs,
            donate=(4,),
            out=lambda r: (self.f.gradient_specs("embed", r[0]), self.f.everywhere(r[1])),
        )
        del weights
        self.visit("embed", None, grads, tally, decision, measures)
        return tally

    # --- gradients and updates ---------------------------------------------------------------------------------------

    def visit(self, stage: str, index: int | None, grads: Nested, tally: Any, decision: Any, measures: bool) -> None:
        """What becomes of gradients: an update, or they wait, on the host if there is a place for them."""
        if decision is not None:
            self.update(stage, index, grads, decision._replace(ok=tally["ok"]))
        elif grads and not measures:
            key = f"gradient {stage}" if index is None else f"gradient {stage} {index}"
            if "gradient" in self.state:
                place = self.gradients.get(key) or part(self.state["gradient"], stage, index)
                self.run.put(key, grads, place)
                self.on_their_way.add(key)
                grads = place
            self.gradients[key] = grads

    def placed(self, key: str) -> Nested:
        """Gradients that wait; where they live."""
        if key in self.on_their_way:
            self.on_their_way.remove(key)
            self.gradients[key] = self.run.placed(key, self.gradients[key])
        return self.gradients[key]

    def waiting(self, stage: str) -> Nested | None:
        """The gradients of the microbatches before, on the device."""
        key = f"gradient {stage}"
        return self.run.take(key, self.placed(key)) if key in self.gradients else None

    def kept_state(self, stage: str, index: int | None) -> tuple[Nested, Nested]:
        """Optimizer state and averages of a stage, or of a unit; where they live."""
        return part(self.state["optimizer"], stage, index), part(self.state["ema"], stage, index)

    def update(self, stage: str, index: int | None, grads: Nested, decision: Any) -> None:
        """Updates a stage, or a unit of the stack, by its gradients, which are on the device."""
        if not grads:
            return
        decision = decision if index is None else decision._replace(layer=self.numbers[index])
        f, run, key = self.f, self.run, stage if index is None else str(index)
        home, old = part(self.state["parameter"], stage, index), self.kept_state(stage, index)
        if index is not None and self.last[0] == index:
            params, self.last = self.last[1]["parameter"], (-1, {})
        else:
            params = run.take(f"home {key}", home)
        new = run(
            f"update {stage}",
            partial(self.f.update, stage),
            (params, *run.take(f"state {key}", old)),
            grads,
            decision,
            donate=(0,),
            out=tuple(f.part_specs(group, stage) for group in ("parameter", "optimizer", "ema")),
        )
        run.put(f"new {key}", new, (home, *old))
        self.going.append((stage, index))
        if index is None:
            del new
            run.flush()  # a table's state is as large as that of several layers: nothing is to stand beside it

    def update_all(self, decision: Any) -> None:
        """The second pass of a step that waits for its norm. What the next update takes comes during this one."""
        self.last, run, keys = (-1, {}), self.run, list(self.gradients)
        for number, key in enumerate(keys):
            _, stage, *rest = key.split(" ")
            index = int(rest[0]) if rest else None
            grads = run.take(key, self.placed(key))
            waited = self.gradients.pop(key)
            if index is None and "gradient" in self.state:
                self.state["gradient"][stage] = waited
            elif "gradient" in self.state:
                self.state["gradient"][stage][index] = waited
            del waited
            if index is not None and number + 1 < len(keys):
                self.want_update(keys[number + 1])
            self.update(stage, index, grads, decision)
            del grads

    def want_update(self, key: str) -> None:
        """All that an update takes is to come with the next program."""
        _, stage, *rest = key.split(" ")
        index = int(rest[0]) if rest else None
        name = stage if index is None else str(index)
        self.run.want(key, self.placed(key))
        self.run.want(f"home {name}", part(self.state["parameter"], stage, index))
        self.run.want(f"state {name}", self.kept_state(stage, index))

    def finished(self, decision: Any, total: Any, tally: Any) -> tuple[State, Metrics]:
        """The new state and the metrics."""
        f, run = self.f, self.run
        finish = partial(self.f.finish, at_once=self.at_once)
        ok = tally["ok"] if self.at_once else decision.ok
        counter, metrics = run("finish", finish, self.state["counter"], decision, total, tally, out=f.everywhere)
        for stage, index in self.going:
            groups = ("parameter", "optimizer", "ema")
            key = stage if index is None else str(index)
            like = tuple(part(self.state[group], stage, index) for group in groups)
            for group, tree in zip(groups, run.placed(f"new {key}", like), strict=True):
                if tree and index is None:
                    self.state[group][stage] = tree
                elif tree:
                    self.state[group][stage][index] = tree
        for stage, new in self.new_buffers.items():
            settle = partial(run, f"buffer {stage}", chosen, ok, out=f.everywhere)
            old = self.state["buffer"][stage]
            whole = not isinstance(new, list)
            self.state["buffer"][stage] = settle(new, old) if whole else list(map(settle, new, old))
        return {**self.state, "counter": counter}, metrics


def _copies(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)
