"""Storage of gradients until their update, and the updates of stages and layers, by layer programs."""

from __future__ import annotations

from functools import partial
from typing import Any

from plimsoll.framework.layout import Nested
from plimsoll.framework.learner.units import Decision, Update
from plimsoll.framework.schedules.layerwise.functions import LayerFunctions
from plimsoll.framework.schedules.layerwise.moves import Moves
from plimsoll.framework.schedules.layerwise.parts import Part
from plimsoll.framework.schedules.step import State


class UpdatePass:
    """Stores one step's gradients and applies its updates. Python references keep arrays alive, see `Pass`.

    Args:
        functions: the computations.
        run: runs their programs.
        numbers: 0, 1, ... on the devices.
        state: the step's state, in containers that belong to the step.
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
        # Gradients that wait for their update, and the parts whose gradients are being moved to the host.
        self.gradients: dict[Part, Nested] = {}
        self.leaving: set[Part] = set()
        self.updated: list[Part] = []

    # --- stored gradients --------------------------------------------------------------------------------------------

    def keep(self, part: Part, grads: Nested) -> None:
        """Store gradients until their update, on the host if there are buffers for them."""
        host_place = self._host_place(part)
        if host_place:
            place = self.gradients.get(part) or host_place
            self.run.put(part.gradients, grads, place)
            self.leaving.add(part)
            grads = place
        self.gradients[part] = grads

    def _host_place(self, part: Part) -> Nested:
        """Return the buffers in host memory for a part's gradients; {} for gradients that stay on the device."""
        return part.of(self.state.get("gradient", {}))

    def _placed(self, part: Part) -> Nested:
        """Return stored gradients, in the memory in which they are stored."""
        if part in self.leaving:
            self.leaving.remove(part)
            self.gradients[part] = self.run.placed(part.gradients, self.gradients[part])
        return self.gradients[part]

    def want_gradients(self, part: Part) -> None:
        """Request that the next program fetches stored gradients, if there are any."""
        if part in self.gradients:
            self.run.want(part.gradients, self._placed(part))

    def earlier_gradients(self, part: Part) -> Nested | None:
        """Return the gradients of earlier microbatches, on the device; None if there are none."""
        if part not in self.gradients:
            return None
        return self.run.take(part.gradients, self._placed(part))

    # --- updates -----------------------------------------------------------------------------------------------------

    def _get_stored_state(self, part: Part) -> tuple[Nested, Nested]:
        """Return optimizer state and averages, in the memory in which they are stored."""
        return part.of(self.state["optimizer"]), part.of(self.state["ema"])

    def want_state(self, part: Part) -> None:
        """Request that the next program fetches optimizer state and averages."""
        self.run.want(part.old_state, self._get_stored_state(part))

    def update(
        self,
        part: Part,
        grads: Nested,
        decision: Decision,
        params: Nested | None = None,
    ) -> None:
        """Update a stage, or a layer of the stack, by its gradients.

        Args:
            part: the stage or layer.
            grads: its gradients, on the device.
            decision: see `Learner.decide`.
            params: its trainable parameters, if they are already on the device.
        """
        if part.index is not None:
            decision = decision._replace(layer=self.numbers[part.index])
        run = self.run
        stored_params = part.of(self.state["parameter"])
        stored_state = self._get_stored_state(part)
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
            # The state of a table is as large as that of several layers: it is moved right away, so that nothing else
            # is on the device in addition to it.
            del new
            run.flush()

    def _new_specs(self, stage: str) -> Update:
        """Return the specs of the results of a stage's or layer's update."""
        specs = self.f.specs
        return specs.part("parameter", stage), specs.part("optimizer", stage), specs.part("ema", stage)

    def update_all(self, decision: Decision) -> None:
        """Update by all stored gradients; the inputs of the next update are fetched during the current one."""
        parts = list(self.gradients)
        for number, part in enumerate(parts):
            grads = self.run.take(part.gradients, self._placed(part))
            stored_grads = self.gradients.pop(part)
            # Buffers in host memory are part of the state; gradients on the device are dropped here.
            if self._host_place(part):
                part.put(self.state["gradient"], stored_grads)
            del stored_grads
            if part.index is not None and number + 1 < len(parts):
                self._want_update(parts[number + 1])
            self.update(part, grads, decision)
            del grads

    def _want_update(self, part: Part) -> None:
        """Request that the next program fetches all inputs of an update."""
        self.want_gradients(part)
        self.run.want(part.old_parameters, part.of(self.state["parameter"]))
        self.want_state(part)

    def settle(self) -> None:
        """Put the updated arrays into the state, in the memory in which they are stored."""
        groups = ("parameter", "optimizer", "ema")
        for part in self.updated:
            old = tuple(part.of(self.state[group]) for group in groups)
            new = self.run.placed(part.updated, old)
            for group, tree in zip(groups, new, strict=True):
                if tree:
                    part.put(self.state[group], tree)
