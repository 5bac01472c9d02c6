"""Gradients that wait for their update, and the updates of stages and units, by the programs of layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from framework.layout import Nested
from framework.learner.units import Decision, Update
from framework.schedules.layerwise.functions import LayerFunctions
from framework.schedules.layerwise.moves import Moves
from framework.schedules.layerwise.parts import Part
from framework.schedules.step import State


class UpdatePass:
    """What becomes of one step's gradients. Arrays are alive as long as Python refers to them, see `Pass`.

    Args:
        functions: what is computed.
        run: calls their programs.
        numbers: 0, 1, ... on the devices.
        state: the step's, in containers of its own.
    """

    def __init__(
        self,
        functions: LayerFunctions,
        run: Moves,
        numbers: list[Any],
        state: State,
    ):
        self.f = functions
        self.run = run
        self.numbers = numbers
        self.state = state
        # Gradients that wait for their update, and which of them are on their way to the host.
        self.gradients: dict[Part, Nested] = {}
        self.leaving: set[Part] = set()
        self.updated: list[Part] = []

    # --- gradients that wait -----------------------------------------------------------------------------------------

    def keep(self, part: Part, grads: Nested) -> None:
        """Lets gradients wait, on the host if there is a place for them."""
        host_place = self._host_place(part)
        if host_place:
            place = self.gradients.get(part) or host_place
            self.run.put(part.gradients, grads, place)
            self.leaving.add(part)
            grads = place
        self.gradients[part] = grads

    def _host_place(self, part: Part) -> Nested:
        """The buffers in host memory for a part's gradients; {} for gradients that stay on the device."""
        return part.of(self.state.get("gradient", {}))

    def _placed(self, part: Part) -> Nested:
        """Gradients that wait; where they live."""
        if part in self.leaving:
            self.leaving.remove(part)
            self.gradients[part] = self.run.placed(part.gradients, self.gradients[part])
        return self.gradients[part]

    def want_gradients(self, part: Part) -> None:
        """Asks for gradients that wait, if there are any, to come with the next program."""
        if part in self.gradients:
            self.run.want(part.gradients, self._placed(part))

    def earlier_gradients(self, part: Part) -> Nested | None:
        """The gradients of earlier microbatches, on the device; None for none."""
        if part not in self.gradients:
            return None
        return self.run.take(part.gradients, self._placed(part))

    # --- updates -----------------------------------------------------------------------------------------------------

    def _stored_state(self, part: Part) -> tuple[Nested, Nested]:
        """Optimizer state and averages; where they live."""
        return part.of(self.state["optimizer"]), part.of(self.state["ema"])

    def want_state(self, part: Part) -> None:
        """Asks for optimizer state and averages to come with the next program."""
        self.run.want(part.old_state, self._stored_state(part))

    def update(
        self,
        part: Part,
        grads: Nested,
        decision: Decision,
        params: Nested | None = None,
    ) -> None:
        """Updates a stage, or a unit of the stack, by its gradients.

        Args:
            part: the stage or unit.
            grads: on the device.
            decision: see `Learner.decide`.
            params: its trainable parameters, where they are on the device already.
        """
        if part.index is not None:
            decision = decision._replace(layer=self.numbers[part.index])
        run = self.run
        stored_params = part.of(self.state["parameter"])
        stored_state = self._stored_state(part)
        if params is None:
            params = run.take(part.old_parameters, stored_params)
        new = run(
            f"update {part.stage}",
            partial(self.f.updates.update, part.stage),
            (params, *run.take(part.old_state, stored_state)),
            grads,
            decision,
            donate=(0,),
            out=self._new_specs(part.stage),
        )
        run.put(part.updated, new, (stored_params, *stored_state))
        self.updated.append(part)
        if part.index is None:
            # A table's state is as large as that of several layers: nothing is to stand beside it.
            del new
            run.flush()

    def _new_specs(self, stage: str) -> Update:
        """The specs of what an update of a stage, or of a unit, returns."""
        specs = self.f.specs
        return specs.part("parameter", stage), specs.part("optimizer", stage), specs.part("ema", stage)

    def update_all(self, decision: Decision) -> None:
        """Updates by the gradients that waited. What the next update takes comes during this one."""
        parts = list(self.gradients)
        for number, part in enumerate(parts):
            grads = self.run.take(part.gradients, self._placed(part))
            stored_grads = self.gradients.pop(part)
            # Hosted buffers are part of the state; gradients on the device end here.
            if self._host_place(part):
                part.put(self.state["gradient"], stored_grads)
            del stored_grads
            if part.index is not None and number + 1 < len(parts):
                self._want_update(parts[number + 1])
            self.update(part, grads, decision)
            del grads

    def _want_update(self, part: Part) -> None:
        """Asks for all that an update takes to come with the next program."""
        self.want_gradients(part)
        self.run.want(part.old_parameters, part.of(self.state["parameter"]))
        self.want_state(part)

    def settle(self) -> None:
        """Puts what was updated into the state, where it lives."""
        groups = ("parameter", "optimizer", "ema")
        for part in self.updated:
            old = tuple(part.of(self.state[group]) for group in groups)
            new = self.run.placed(part.updated, old)
            for group, tree in zip(groups, new, strict=True):
                if tree:
                    part.put(self.state[group], tree)
