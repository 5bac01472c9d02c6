"""Host transfers of a step with memory.update = layer_programs, by the programs that they are part of.

The devices run one program after the other, and a program ends when its transfers do. So only the computation of the
same program hides a transfer, and the step waits for the rest. `schedules.layerwise` decides which program moves what:

- The forward pass of a layer writes its activations and fetches the weights of the next layer.
- The backward pass fetches weights, activations and earlier gradients of the layer below, and writes the gradients of
  the layer above. With memory.gradients = none, it also fetches the layer's optimizer state, and writes the new state
  and weights of the layer above.
- Otherwise, separate programs update one layer each, and move state and gradients of its neighbors. Hardly any
  computation hides these transfers.
- Embedding and head are moved between programs.

With memory.accumulate_by = layer, a layer's weights, gradients and state are moved by the programs of its first or last
microbatch. Each microbatch moves its own activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.framework.layout import GROUPS, Group, StateLayout
from plimsoll.framework.models.causal_lm import CausalLM
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.schedules.stack_layout import STACK


@dataclass(frozen=True)
class ProgramTransfers:
    """Host transfers that are part of a program.

    Attributes:
        runs: number of runs of the program in a step.
        to_host: bytes that one run moves to the host, per device.
        from_host: bytes that one run moves from the host, per device.
        product_share: fraction of the step's matrix products that one run computes.
    """

    runs: int
    to_host: float
    from_host: float
    product_share: float

    @property
    def link_bytes(self) -> float:
        """Bytes that determine the time of all runs: both directions are used at the same time."""
        return self.runs * max(self.to_host, self.from_host)

    def count_exposed_seconds(self, bytes_per_second: float, compute_seconds: float) -> float:
        """Return the seconds by which the transfers of all runs exceed their computation.

        Args:
            bytes_per_second: rate of the host link, in each direction.
            compute_seconds: seconds of the step's computation that follows the matrix products' shares.
        """
        seconds = self.link_bytes / bytes_per_second
        return max(0.0, seconds - self.runs * self.product_share * compute_seconds)


def count_layer_transfers(
    experiment: Experiment, layout: StateLayout, num_devices: int, device_flops: float, offloaded_activations: int
) -> tuple[ProgramTransfers, ...]:
    """Return the host transfers of a step.

    Args:
        experiment: the experiment, with memory.update = layer_programs.
        layout: layout of the state during training, in which each layer of the stack has its own leaves.
        num_devices: number of devices of the mesh.
        device_flops: FLOPs of a step on one device.
        offloaded_activations: bytes of one microbatch's offloaded activations, per device.
    """
    memory = experiment.memory
    learner = experiment.learner
    stack = experiment.model.stacks[STACK]
    num_layers = stack.num_repeats
    accumulate = learner.accumulate
    is_updated_at_once = memory.traits.updates_in_backward
    num_backward = 2 if is_updated_at_once and learner.clip_mode == "two_pass" else 1
    layer_bytes, outside_bytes = _split_offloaded_bytes(layout, num_layers)

    forward_flops = _count_forward_flops(experiment, num_devices)
    head_flops = _count_head_flops(experiment, num_devices)
    # The head's backward pass, with twice the FLOPs of its forward pass, is part of the same program.
    backward_flops = max(0.0, (device_flops - forward_flops) / num_backward - 2 * head_flops)
    programs_per_pass = num_layers * accumulate
    forward_share = max(0.0, forward_flops - head_flops) / device_flops / programs_per_pass
    backward_share = backward_flops / device_flops / programs_per_pass

    # Passes of a step over all layers, each for some of its microbatches.
    num_passes = accumulate // experiment.microbatches_per_pass
    num_others = experiment.microbatches_per_pass - 1

    num_offloading = memory.activations.num_offloaded("activations", stack)
    transfers = []
    for index, offloaded in enumerate(layer_bytes):
        activations = offloaded_activations / num_offloading if index < num_offloading else 0.0
        weights = offloaded["parameter"] + offloaded["frozen"]
        state = offloaded["optimizer"] + offloaded["ema"]
        gradients = offloaded["gradient"]
        written = state + offloaded["parameter"]
        fetched = weights + activations
        transfers.append(ProgramTransfers(num_passes, activations, weights, forward_share))
        if num_others:
            transfers.append(ProgramTransfers(num_others, activations, 0, forward_share))
            # In the last backward pass, one of the other microbatches fetches the state.
            runs = num_backward * num_others - is_updated_at_once
            transfers.append(ProgramTransfers(runs, 0, activations, backward_share))
        if is_updated_at_once:
            transfers += [ProgramTransfers(1, 0, fetched, backward_share)] * (num_backward - 1)
            if num_others:
                transfers.append(ProgramTransfers(1, written, fetched, backward_share))
                transfers.append(ProgramTransfers(1, 0, activations + state, backward_share))
            else:
                transfers.append(ProgramTransfers(1, written, fetched + state, backward_share))
        else:
            # The first pass has no earlier gradients to fetch.
            earlier = gradients * (num_passes - 1) / num_passes
            transfers.append(ProgramTransfers(num_passes, gradients, fetched + earlier, backward_share))
            transfers.append(ProgramTransfers(1, written, written + gradients, 0.0))

    # Each pass fetches the weights of embedding and head for the forward and the backward pass. The update
    # fetches state and gradients, and then writes state and weights.
    weights = outside_bytes["parameter"] + outside_bytes["frozen"]
    state = outside_bytes["optimizer"] + outside_bytes["ema"]
    outside = num_passes * ((1 + num_backward) * weights + outside_bytes["gradient"])
    outside += 2 * state + outside_bytes["parameter"]
    transfers.append(ProgramTransfers(1, 0, outside, 0.0))
    return tuple(transfers)


def _split_offloaded_bytes(layout: StateLayout, num_layers: int) -> tuple[list[dict[Group, int]], dict[Group, int]]:
    """Return the bytes in host memory by group: of each layer of the stack, and of everything else."""
    layer_bytes = [dict.fromkeys(GROUPS, 0) for _ in range(num_layers)]
    outside_bytes = dict.fromkeys(GROUPS, 0)
    for leaf in layout:
        if not leaf.spec.is_offloaded:
            continue
        _, stage, index, *_ = leaf.path.split("/")
        group_bytes = layer_bytes[int(index)] if stage == STACK else outside_bytes
        group_bytes[leaf.group] += leaf.bytes_per_device
    return layer_bytes, outside_bytes


def _count_forward_flops(experiment: Experiment, num_devices: int) -> float:
    """Return the FLOPs of a step's forward passes on one device."""
    data = experiment.data
    tokens = data.global_batch_size * data.seq_len
    return experiment.model.forward_flops_per_token(data.seq_len) * tokens / num_devices


def _count_head_flops(experiment: Experiment, num_devices: int) -> float:
    """Return the FLOPs of the head's forward passes in a step on one device."""
    model = experiment.model
    assert isinstance(model, CausalLM)
    data = experiment.data
    return 2.0 * model.dim * model.vocab_size * data.global_batch_size * data.seq_len / num_devices
