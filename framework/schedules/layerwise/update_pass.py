"""Stores gradients until their update, and updates stages and layers, by layer programs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from plimsoll.framework.layout import Nested
from plimsoll.framework.learner.decisions import Decision
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
        # Gradients that wait for their update, and the update units whose gradients are being moved to the host.
        self.gradients: dict[UpdateUnit, Nested] = {}
        self.leaving: set[UpdateUnit] = set()
        self.update_results: list[UpdateUnit] = []

    # --- stored gradients --------------------------------------------------------------------------------------------

    def store_gradients(self, update_unit: UpdateUnit, grads: Nested) -> None:
        """Store gradients until their update, on the host if there are buffers for them."""
        host_buffers = self._get_host_buffers(update_unit)
        if host_buffers:
            stored_gradients = self.gradients.get(update_unit) or host_buffers
            self.run.put(update_unit.gradients, grads, stored_gradients)
            self.leaving.add(update_unit)
            grads = stored_gradients
        self.gradients[update_unit] = grads

    def _get_host_buffers(self, update_unit: UpdateUnit) -> Nested:
        """Return the buffers in host memory for an update unit's gradients; {} if they stay on the device."""
        return update_unit.select(self.state.get("gradient", {}))

    def _get_stored_gradients(self, update_unit: UpdateUnit) -> Nested:
        """Return stored gradients, in the memory in which they are stored."""
        if update_unit in self.leaving:
            self.leaving.remove(update_unit)
            self.gradients[update_unit] = self.run.get_stored(update_unit.gradients, self.gradients[update_unit])
        return self.gradients[update_unit]

    def request_gradients(self, update_unit: UpdateUnit) -> None:
        """Request that the next program fetches stored gradients, if there are any."""
        if update_unit in self.gradients:
            self.run.request(update_unit.gradients, self._get_stored_gradients(update_unit))

    def earlier_gradients(self, update_unit: UpdateUnit) -> Nested | None:
        """Return the gradients of earlier microbatches, on the device; None if there are none."""
        if update_unit not in self.gradients:
            return None
        return self.run.take(update_unit.gradients, self._get_stored_gradients(update_unit))

    # --- updates -----------------------------------------------------------------------------------------------------

    def _get_stored_state(self, update_unit: UpdateUnit) -> tuple[Nested, Nested]:
        """Return optimizer state and averages, in the memory in which they are stored."""
        return update_unit.select(self.state["optimizer"]), update_unit.select(self.state["ema"])

    def request_state(self, update_unit: UpdateUnit) -> None:
        """Request that the next program fetches optimizer state and averages."""
        self.run.request(update_unit.old_state, self._get_stored_state(update_unit))

    def update(self, update_unit: UpdateUnit, grads: Nested, decision: Decision, params: Nested | None = None) -> None:
        """Update a stage, or a layer of the stack, by its gradients.

        Args:
            update_unit: the stage or layer.
            grads: its gradients, on the device.
            decision: see `Learner.decide`.
            params: its trainable parameters, if they are already on the device.
        """
        if update_unit.index is not None:
            decision = replace(decision, layer=self.numbers[update_unit.index])
        run = self.run
        stored_params = update_unit.select(self.state["parameter"])
        stored_state = self._get_stored_state(update_unit)
        if params is None:
            params = run.take(update_unit.old_parameters, stored_params)
        new = run(
            f"update {update_unit.stage}",
            partial(self.f.updates.update, update_unit.stage),
            (params, *run.take(update_unit.old_state, stored_state)),
            grads,
            decision,
            donate=(0,),
            out=tuple(self.f.specs.part(group, update_unit.stage) for group in ("parameter", "optimizer", "ema")),
        )
        run.put(update_unit.update_results, new, (stored_params, *stored_state))
        self.update_results.append(update_unit)
        if update_unit.index is None:
            # The state of a table is as large as that of several layers: it is moved right away, so that nothing else
            # is on the device in addition to it.
            del new
            run.flush()

    def update_all(self, decision: Decision) -> None:
        """Update by all stored gradients; the inputs of the next update are fetched during the current one."""
        update_units = list(self.gradients)
        for number, update_unit in enumerate(update_units):
            grads = self.run.take(update_unit.gradients, self._get_stored_gradients(update_unit))
            stored_grads = self.gradients.pop(update_unit)
            # Buffers in host memory are part of the state; gradients on the device are dropped here.
            if self._get_host_buffers(update_unit):
                update_unit.put(self.state["gradient"], stored_grads)
            del stored_grads
            if update_unit.index is not None and number + 1 < len(update_units):
                self._request_update(update_units[number + 1])
            self.update(update_unit, grads, decision)
            del grads

    def _request_update(self, update_unit: UpdateUnit) -> None:
        """Request that the next program fetches all inputs of an update."""
        self.request_gradients(update_unit)
        self.run.request(update_unit.old_parameters, update_unit.select(self.state["parameter"]))
        self.request_state(update_unit)

    def finalize(self) -> None:
        """Put the updated arrays into the state, in the memory in which they are stored."""
        groups = ("parameter", "optimizer", "ema")
        for update_unit in self.update_results:
            old = tuple(update_unit.select(self.state[group]) for group in groups)
            new = self.run.get_stored(update_unit.update_results, old)
            for group, tree in zip(groups, new, strict=True):
                if tree:
                    update_unit.put(self.state[group], tree)
