"""Storage of gradients until their update, and the updates of stages and layers, by layer programs."""

from __future__ import annotations

from functools import partial
from typing import Any

from plimsoll.framework.layout import Nested
from plimsoll.framework.learner.update_types import Decision, LayerUpdate
from plimsoll.framework.schedules.layerwise.functions import LayerFunctions
from plimsoll.framework.schedules.layerwise.transfers import TransferQueue
from plimsoll.framework.schedules.layerwise.update_units import UpdateUnit
from plimsoll.framework.schedules.step import State


class UpdatePass:
    """Stores one step's gradients and applies its updates. Python references keep arrays alive, see `Pass`.

    Args:
        functions: the computations.
        run: runs their programs.
        numbers: 0, 1, ... on the devices.
        state: the step's state, in containers that belong to the step.
    """

    def __init__(self, functions: LayerFunctions, run: TransferQueue, numbers: list[Any], state: State):
        self.f = functions
        self.run = run
        self.numbers = numbers
        self.state = state
        # Gradients that wait for their update, and the parts whose gradients are being moved to the host.
        self.gradients: dict[UpdateUnit, Nested] = {}
        self.leaving: set[UpdateUnit] = set()
        self.update_results: list[UpdateUnit] = []

    # --- stored gradients --------------------------------------------------------------------------------------------

    def store_gradients(self, part: UpdateUnit, grads: Nested) -> None:
        """Store gradients until their update, on the host if there are buffers for them."""
        host_buffers = self._get_host_buffers(part)
        if host_buffers:
            stored_gradients = self.gradients.get(part) or host_buffers
            self.run.put(part.gradients, grads, stored_gradients)
            self.leaving.add(part)
            grads = stored_gradients
        self.gradients[part] = grads

    def _get_host_buffers(self, part: UpdateUnit) -> Nested:
        """Return the buffers in host memory for a part's gradients; {} for gradients that stay on the device."""
        return part.select(self.state.get("gradient", {}))

    def _get_stored_gradients(self, part: UpdateUnit) -> Nested:
        """Return stored gradients, in the memory in which they are stored."""
        if part in self.leaving:
            self.leaving.remove(part)
            self.gradients[part] = self.run.get_stored(part.gradients, self.gradients[part])
        return self.gradients[part]

    def request_gradients(self, part: UpdateUnit) -> None:
        """Request that the next program fetches stored gradients, if there are any."""
        if part in self.gradients:
            self.run.request(part.gradients, self._get_stored_gradients(part))

    def earlier_gradients(self, part: UpdateUnit) -> Nested | None:
        """Return the gradients of earlier microbatches, on the device; None if there are none."""
        if part not in self.gradients:
            return None
        return self.run.take(part.gradients, self._get_stored_gradients(part))

    # --- updates -----------------------------------------------------------------------------------------------------

    def _get_stored_state(self, part: UpdateUnit) -> tuple[Nested, Nested]:
        """Return optimizer state and averages, in the memory in which they are stored."""
        return part.select(self.state["optimizer"]), part.select(self.state["ema"])

    def request_state(self, part: UpdateUnit) -> None:
        """Request that the next program fetches optimizer state and averages."""
        self.run.request(part.old_state, self._get_stored_state(part))

    def update(self, part: UpdateUnit, grads: Nested, decision: Decision, params: Nested | None = None) -> None:
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
        stored_params = part.select(self.state["parameter"])
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
        run.put(part.update_results, new, (stored_params, *stored_state))
        self.update_results.append(part)
        if part.index is None:
            # The state of a table is as large as that of several layers: it is moved right away, so that nothing else
            # is on the device in addition to it.
            del new
            run.flush()

    def _new_specs(self, stage: str) -> LayerUpdate:
        """Return the specs of the results of a stage's or layer's update."""
        specs = self.f.specs
        return specs.part("parameter", stage), specs.part("optimizer", stage), specs.part("ema", stage)

    def update_all(self, decision: Decision) -> None:
        """Update by all stored gradients; the inputs of the next update are fetched during the current one."""
        parts = list(self.gradients)
        for number, part in enumerate(parts):
            grads = self.run.take(part.gradients, self._get_stored_gradients(part))
            stored_grads = self.gradients.pop(part)
            # Buffers in host memory are part of the state; gradients on the device are dropped here.
            if self._get_host_buffers(part):
                part.put(self.state["gradient"], stored_grads)
            del stored_grads
            if part.index is not None and number + 1 < len(parts):
                self._request_update(parts[number + 1])
            self.update(part, grads, decision)
            del grads

    def _request_update(self, part: UpdateUnit) -> None:
        """Request that the next program fetches all inputs of an update."""
        self.request_gradients(part)
        self.run.request(part.old_parameters, part.select(self.state["parameter"]))
        self.request_state(part)

    def finalize(self) -> None:
        """Put the updated arrays into the state, in the memory in which they are stored."""
        groups = ("parameter", "optimizer", "ema")
        for part in self.update_results:
            old = tuple(part.select(self.state[group]) for group in groups)
            new = self.run.get_stored(part.update_results, old)
            for group, tree in zip(groups, new, strict=True):
                if tree:
                    part.put(self.state[group], tree)
