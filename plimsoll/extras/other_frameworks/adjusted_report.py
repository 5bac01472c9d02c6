"""Changes the memory of a plan from what our program stores to what another framework stores.

Our plan of a run has our dtypes and our sharding. Other frameworks keep gradients in buffers, shard only a part of the
state (ZeRO-1 and 2), or hold the activations of several microbatches in a pipeline. `adjust_report` counts their bytes
by the layout of our state, and leaves the time as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from jax.sharding import AbstractMesh, Mesh

from plimsoll.extras.other_frameworks.foreign_run import OUR_LOGIT_BYTES, ForeignRun
from plimsoll.framework.config import Config
from plimsoll.framework.layout import StateLayout
from plimsoll.framework.plan.estimate import Estimate, PassBytes, estimate_pass
from plimsoll.framework.plan.plan_report import EstimateReport, PhaseReport, PlanReport
from plimsoll.framework.plan.suggest import check_target, estimate_for_target
from plimsoll.framework.plan.targets import Target
from plimsoll.framework.program.experiment import Experiment
from plimsoll.framework.terminal.tables import human_bytes

# Bytes of a token table that an adapter's run trains as a whole: a float32 copy, its gradient, two moments.
_SAVED_TABLE_BYTES = 16
# Bytes of a scale that is quantized too: one in 8 bits, and a float32 for each 256 of them (section 3 of QLoRA).
_DOUBLE_QUANTIZED_SCALE_BYTES = 1 + 4 / 256


@dataclass(frozen=True)
class LocalCount:
    """Parameters of one device, by how they are shared: before any data-parallel sharding.

    Attributes:
        shared: trainable parameters other than experts.
        experts: trainable parameters of experts.
    """

    shared: int
    experts: int


def adjust_report(
    report: PlanReport, run: ForeignRun, config: Config, target: Target, *, last_stage: bool = False
) -> PlanReport:
    """Return a report with the memory that the other framework's run needs.

    Args:
        report: our plan of the run, by the compiler or the estimate.
        run: the run.
        config: our config of it, resolved for the target.
        target: the machine.
        last_stage: count the last stage of a pipeline, and not the one that needs the most.
    """
    experiment: Experiment = config.instantiate()
    extra = _extra_bytes(run, experiment, target)
    if run.stored is None and run.logit_bytes <= OUR_LOGIT_BYTES and not extra:
        return report
    need = estimate_for_target(experiment, target)
    theirs = dict(need.breakdown) | count_stored(run, experiment, target, need, last_stage=last_stage)
    for group, size in extra.items():
        theirs[group] += size
    # The difference of the two estimates is added to the plan, which may be a compiled one.
    changes = {group: theirs[group] - size for group, size in need.breakdown.items()}
    return _apply(report, changes, run)


def count_stored(
    run: ForeignRun, experiment: Experiment, target: Target, need: Estimate, *, last_stage: bool = False
) -> dict[str, int]:
    """Return the bytes by group that one device of the other framework holds at its peak.

    Args:
        run: the run.
        experiment: our experiment of it.
        target: the machine.
        need: the estimate of our experiment.
        last_stage: count the last stage of a pipeline, and not the one that needs the most.
    """
    sizes = check_target(experiment, target)
    stored = run.stored
    input_shards = sizes["model"] if stored is not None and stored.divides_inputs else 1
    passes = estimate_pass(experiment, sizes, target.spec, input_shards=input_shards)
    if "offload" in run.remat or "activations" in run.offloaded:
        # Residuals are in host memory during the loss.
        passes = replace(passes, residuals=0)
    loss = count_loss(run, experiment, sizes)
    # During the loss, all residuals exist, and no gradient of a layer.
    ours = {group: need.breakdown[group] for group in ("activations", "gradients")}
    during_loss = {"activations": passes.residuals + loss, "gradients": 0}
    if stored is None:
        return max(ours, during_loss, key=_total)
    count = count_local(experiment, sizes)
    experts = sizes["expert"]

    def share(bytes_each: float, shards: int) -> int:
        # Devices that hold different experts share no expert, so fewer of them share each one.
        expert_shards = max(1, shards // experts)
        return round(count.shared * bytes_each / shards + count.experts * bytes_each / expert_shards)

    gathered = 2 * min(stored.unsharded, count.shared + count.experts)
    parameters = share(stored.parameter, stored.parameter_shards) + gathered
    gradients = share(stored.gradient, stored.gradient_shards)
    state = need.breakdown["optimizer_state"] if stored.state is None else share(stored.state, stored.state_shards)
    if "optimizer_state" in run.offloaded:
        state = 0
    if "gradients" in run.offloaded:
        gradients = 0
    our_gradients = sum(leaf.bytes_per_device for leaf in need.layout if leaf.group == "parameter")
    has_our_gradients = not stored.keeps_gradients and abs(gradients - our_gradients) <= our_gradients / 100
    # After the backward pass, activations are gone, all gradients exist, and the update needs its temporaries.
    moments = [{"activations": share(stored.update, stored.state_shards), "gradients": gradients}]
    if has_our_gradients and run.mesh.stages == 1 and input_shards == 1:
        # As in our program, gradients take the place of activations that are freed.
        moments += [ours, during_loss]
    else:
        activations = count_activations(run, passes, loss, last_stage=last_stage)
        moments.append({"activations": activations, "gradients": gradients})
    most = max(moments, key=_total)
    return {
        "parameters": parameters,
        "optimizer_state": state,
        "other": need.breakdown["other"] + stored.buffers,
        **most,
    }


def count_loss(run: ForeignRun, experiment: Experiment, sizes: dict[str, int]) -> int:
    """Return the bytes of the logits and their copies, on a device that computes the loss of a microbatch."""
    if not run.whole_logits:
        return 0
    data = experiment.data
    rows = data.global_batch_size // (experiment.learner.accumulate * run.mesh.batch_groups)
    tokens = rows * data.seq_len // sizes["seq"]
    return round(tokens * experiment.language_model.vocab_size * run.logit_bytes / sizes["model"])


def _total(groups: dict[str, int]) -> int:
    return sum(groups.values())


def count_local(experiment: Experiment, sizes: dict[str, int]) -> LocalCount:
    """Count the trainable parameters of the device that has most of them, if data-parallel devices share nothing.

    In a pipeline, the first stage has the embedding and the last one the head, each as a whole.

    Args:
        experiment: our experiment.
        sizes: {mesh axis: size}.
    """
    unshared = sizes | {"data": 1, "fsdp": 1, "seq": 1, "expert": 1}
    layers = _count_elements(experiment, unshared)
    by_expert = _count_elements(experiment, unshared | {"expert": sizes["expert"]})
    tables = _count_elements(experiment, unshared | {"pipe": 1})
    shared = sum(count for path, count in layers.items() if not _is_expert(path) and not _is_table(path))
    embedding = sum(count for path, count in tables.items() if path.startswith("parameter/embed"))
    head = sum(count for path, count in tables.items() if path.startswith("parameter/head"))
    shared += max(embedding, head) if sizes["pipe"] > 1 else embedding + head
    return LocalCount(shared, sum(count for path, count in by_expert.items() if _is_expert(path)))


def count_activations(run: ForeignRun, passes: PassBytes, loss: int, *, last_stage: bool = False) -> int:
    """Return the activations of the stage of a pipeline that has most of them; without a pipeline, of a pass.

    The first stage has started the most microbatches, and the last one computes the loss.

    Args:
        run: the run.
        passes: the bytes of a pass.
        loss: bytes of the logits and their copies.
        last_stage: count the last stage.
    """
    if run.mesh.stages == 1:
        return max(passes.activations, passes.residuals + loss)
    first = passes.activations + passes.residuals * (count_in_flight(run, 0) - 1)
    last = max(passes.others, loss) + passes.residuals * count_in_flight(run, run.mesh.stages - 1)
    return last if last_stage else max(first, last)


def count_in_flight(run: ForeignRun, stage: int) -> int:
    """Return for how many chunks of layers a stage of a pipeline holds activations at most (1F1B, arXiv 2104.04473)."""
    stages, chunks = run.mesh.stages, run.mesh.chunks
    if chunks == 1:
        return min(stages - stage, run.accumulate)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, chunks * run.accumulate)


def _extra_bytes(run: ForeignRun, experiment: Experiment, target: Target) -> dict[str, int]:
    """Return the bytes by group of weights that our config of the run does not have."""
    extra: dict[str, int] = {}
    sizes = experiment.mesh.resolve(target.num_devices)
    shards = run.mesh.shards
    if run.adapter is not None and run.adapter.saved_tables:
        model = experiment.language_model
        table = model.vocab_size * model.dim
        extra["optimizer_state"] = round(run.adapter.saved_tables * table * _SAVED_TABLE_BYTES / shards)
    if run.adapter is not None and run.adapter.double_quantized:
        scales = sum(
            leaf.bytes_per_device
            // leaf.spec.dtype.itemsize
            * (leaf.spec.dtype.itemsize - _DOUBLE_QUANTIZED_SCALE_BYTES)
            for leaf in _build_layout(experiment, sizes)
            if leaf.group == "frozen" and leaf.path.endswith("/scales")
        )
        extra["frozen"] = -round(scales)
    if run.objective == "pairs with a reference" and run.method == "full":
        count = count_local(experiment, sizes)
        width = 2 if run.precision != "float32" else 4
        extra["frozen"] = round((count.shared + count.experts) * width / shards)
    return extra


def _count_elements(experiment: Experiment, sizes: dict[str, int]) -> dict[str, int]:
    """Return {path: elements on one device} of the trainable parameters, on a mesh of these sizes."""
    layout = _build_layout(experiment, sizes)
    return {
        leaf.path: leaf.bytes_per_device // leaf.spec.dtype.itemsize for leaf in layout if leaf.group == "parameter"
    }


def _build_layout(experiment: Experiment, sizes: dict[str, int]) -> StateLayout:
    """Return the layout of the state on a mesh of these sizes."""
    return StateLayout(experiment.state_specs(), cast(Mesh, AbstractMesh(tuple(sizes.values()), tuple(sizes))))


def _is_expert(path: str) -> bool:
    return "/experts/" in path


def _is_table(path: str) -> bool:
    return path.startswith(("parameter/embed", "parameter/head"))


def _apply(report: PlanReport, changes: dict[str, int], run: ForeignRun) -> PlanReport:
    """Add bytes by group to a report, and decide again whether it fits."""
    total = sum(changes.values())
    breakdown = {group: max(0, size + changes.get(group, 0)) for group, size in report.breakdown.items()}
    allocated = report.device_allocated_bytes + total
    limit = report.device_limit_bytes
    host_fits = report.host is None or report.host.fits
    differences = [
        f"{group.replace('_', ' ')} {'+' if size > 0 else '-'}{human_bytes(abs(size))}"
        for group, size in changes.items()
        if abs(size) >= 1 << 20
    ]
    compared = ", ".join(differences) or "the same"
    note = f"memory is counted as {run.framework} uses it; compared with our program: {compared}"
    phases = {"train": PhaseReport(allocated, report.host_peak_bytes)} if report.phases else {}
    peak = report.device_peak_bytes + total
    estimate = report.estimate
    if estimate is not None:
        estimated = estimate.device_peak_bytes + total
        estimate = EstimateReport(
            device_peak_bytes=estimated,
            breakdown={group: max(0, size + changes.get(group, 0)) for group, size in estimate.breakdown.items()},
            error=None if estimate.error is None else estimated / peak - 1,
        )
    return replace(
        report,
        breakdown=breakdown,
        device_peak_bytes=peak,
        device_allocated_bytes=allocated,
        device_temp_bytes=max(0, report.device_temp_bytes + total),
        phases=phases,
        estimate=estimate,
        fits=not report.message and host_fits and (limit is None or allocated <= limit),
        # They describe our program, of which another amount is needed.
        suggestions=[],
        largest=[],
        notes=[*report.notes, note],
    )
