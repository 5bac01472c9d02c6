"""Reference training with plain optax on one tensor per layer, and all the ways of training that must match it.

The reference shares the model's loss with the framework but none of the update code: no learner, no schedule, no
stacked optimizer state. To test a new schedule, add a line to MEMORY; for a new remat policy, add it to REMATS. All
exactness tests then run it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import combinations, product
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from plimsoll.framework import layout
from plimsoll.framework.config import Config, config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.base import Context
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.layout import flatten
from plimsoll.framework.optimizers import named
from plimsoll.framework.optimizers.partition import PartitionedGradientTransformation
from plimsoll.framework.optimizers.rounding import fold, fold_name
from plimsoll.framework.program.per_layer_step import PerLayerStep
from plimsoll.framework.program.program import Program
from plimsoll.framework.schedules import chunked_update
from tests.support import small
from tests.support.latent import with_latents
from tests.support.layers import Recurrent, Twins

STEPS, POISONED = 20, 7  # the loss weights of step 7's batch are NaN
NUM_LAYERS = 4
STACKS = {"first", "stack"}

# Schedules: the fields of config.memory, and the learner fields that the schedule requires (for example no clip).
# Those in NO_PARTS refuse microbatches.
MEMORY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "after_backward": ({"update": "after_backward"}, {}),
    "streamed": ({"update": "streamed"}, {}),
    "hosted_gradients": ({"update": "streamed", "gradients": "pinned_host"}, {}),
    "in_backward": ({"update": "in_backward"}, {"clip": None}),
    "two_pass": ({"update": "in_backward"}, {"clip_mode": "two_pass"}),
}
# The same with layer_programs. Each case compiles twenty programs, so these have separate tests.
LAYER_PROGRAMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layers": ({"update": "layer_programs"}, {}),
    "layers_hosted_gradients": ({"update": "layer_programs", "gradients": "pinned_host"}, {}),
    "layers_at_once": ({"update": "layer_programs", "gradients": "none"}, {"clip": None}),
    "layers_two_pass": ({"update": "layer_programs", "gradients": "none"}, {"clip_mode": "two_pass"}),
}
# The same with a layer's state fetched during its backward pass; only with offloaded optimizer state.
AHEAD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{name}_ahead": ({**MEMORY[name][0], "prefetch": "layer"}, MEMORY[name][1])
    for name in ("in_backward", "two_pass", "hosted_gradients")
}
# Layers are updated in the backward pass, and once more if the norm of all gradients clips; the same restriction.
SPECULATIVE = "speculative"
AHEAD[SPECULATIVE] = ({**MEMORY["hosted_gradients"][0], "prefetch": "speculative"}, {})
# All microbatches run through a layer before the next one.
TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{name}_together": ({**memory, "accumulate_by": "layer"}, learner)
    for name, (memory, learner) in (MEMORY | AHEAD | LAYER_PROGRAMS).items()
    if name != "after_backward"
}
# The next step updates the stacks.
DELAYED = "hosted_gradients_ahead"
SCHEDULES = MEMORY | LAYER_PROGRAMS | AHEAD | TOGETHER
NO_PARTS = (*AHEAD, "in_backward", "two_pass", "layers_at_once", "layers_two_pass")
PLACEMENTS = {"device": (), "state": ("optimizer_state",)}  # the config.memory fields that are offloaded
PLACEMENTS |= {
    "weights": ("parameters",),
    "boundaries": ("activations",),
    "all": ("optimizer_state", "parameters", "activations"),
}
PLACEMENTS |= {"state+weights": PLACEMENTS["all"][:2], "weights+boundaries": PLACEMENTS["all"][1:]}
PLACEMENTS |= {"state+boundaries": PLACEMENTS["all"][::2]}
# Only for the model with experts, in separate tests.
PLACEMENTS |= {"experts": ("experts",), "experts+boundaries": ("experts", "activations")}
REMATS = ("none", "full", "save:attention", "sqrt", "offload", "invert")
MESHES = {"one": None, "eight": {"data": 2, "fsdp": 2, "model": 2}}
# Four devices share a row, and weights are sharded over both axes.
SHARED_ROWS = {"shared rows": {"fsdp": 2, "seq": 4}}
# The meshes of eight devices for models with experts.
MODEL_MESHES = {
    ("eight", "experts"): {"fsdp": 2, "expert": 2, "model": 2},
    ("eight", "latent"): {"fsdp": 2, "expert": 2, "model": 2},
    ("shared rows", "experts"): {"fsdp": 2, "expert": 2, "seq": 2},
    ("shared rows", "latent"): {"fsdp": 2, "expert": 2, "seq": 2},
    # The axis divides the heads of the recurrence.
    ("shared rows", "recurrent"): {"fsdp": 4, "seq": 2},
}

# Dtypes of parameters and master copy, and how much parameters may differ (see `differences`).
# The model always computes in float64, because the tests compare updates. 20 steps would amplify the rounding of a
# float32 forward pass, although both sides share it: Lion flips the sign of an element whose momentum is only rounding
# error, 2e-2 of its leaf. Similarly, the last bit of a master copy may decide which way a bfloat16 weight is rounded.
# So with a master copy, the reference takes its gradients at the framework's weights, which must equal the framework's
# master weights after the cast.
PRECISIONS = {
    "float64": ("float64", None, 1e-12),
    "float32": ("float32", None, 1e-6),
    "bfloat16": ("bfloat16", "float32", 1e-6),
}


def sign_momentum(*, learning_rate: float, beta: float = 0.9, decay: float = 0.1) -> optax.GradientTransformation:
    """Custom user optimizer: sign of the momentum, decoupled decay, and a rate that falls with each update."""

    def init(params: Any) -> Any:
        return {"momentum": jax.tree.map(jnp.zeros_like, params), "seen": jax.tree.map(lambda _: jnp.int32(0), params)}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        momentum = jax.tree.map(lambda m, g: beta * m + (1.0 - beta) * g, state["momentum"], grads)
        seen = jax.tree.map(lambda n: n + 1, state["seen"])
        rates = jax.tree.map(lambda n, p: learning_rate / jnp.sqrt(n.astype(p.dtype)), seen, params)
        changes = jax.tree.map(lambda r, m, p: -r * (jnp.sign(m) + decay * p), rates, momentum, params)
        return changes, {"momentum": momentum, "seen": seen}

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "sgd": config_for(optax.sgd, learning_rate=3e-3, momentum=0.9),
    "adamw": config_for(optax.adamw, learning_rate=1e-3, eps=1e-4, weight_decay=0.1),
    "adafactor": config_for(optax.adafactor, learning_rate=1e-2, min_dim_size_to_factor=8, weight_decay_rate=1e-3),
    "lion": config_for(optax.lion, learning_rate=1e-3, weight_decay=0.1),
    "muon": config_for(optax.contrib.muon, learning_rate=1e-3, weight_decay=0.1),
    "sign_momentum": config_for(sign_momentum, learning_rate=1e-3),
}
# Optimizers with small state. They have separate tests, since each is combined with fewer of the other axes.
SMALL = {
    "adalomo": config_for(named.OPTIMIZERS["adalomo"], learning_rate=1e-2, weight_decay=0.1),
    "galore": config_for(
        named.OPTIMIZERS["galore"], learning_rate=3e-3, rank=4, update_proj_gap=7, scale=1.0, weight_decay=0.1
    ),
    "apollo": config_for(named.OPTIMIZERS["apollo"], learning_rate=1e-3, rank=4, update_interval=7, weight_decay=0.1),
    "apollo_mini": config_for(
        named.OPTIMIZERS["apollo_mini"], learning_rate=1e-3, scale=32.0, update_interval=7, weight_decay=0.1
    ),
    "adam_mini": config_for(named.OPTIMIZERS["adam_mini"], learning_rate=1e-3, eps=1e-4, weight_decay=0.1),
    "adamw8bit": config_for(
        named.OPTIMIZERS["adamw8bit"], learning_rate=1e-3, eps=1e-4, weight_decay=0.1, min_size=256, block=16
    ),
    "muon by roles": config_for(named.OPTIMIZERS["muon"], learning_rate=1e-3, weight_decay=0.1),
}


def tied(*layers: type | None, shared: tuple[int, ...] = ()) -> Config:
    """Return a model with a stack of these layers (None: a Llama block), tied embedding and head, and dropout.

    Attention has no biases, because the gradient of a key bias is only rounding error.
    """
    config = small.llama(embed__dropout=0.1, head__tied=True)
    small.block(config).dropout = 0.1
    pattern = [small.block(config) if layer is None else config_for(layer) for layer in layers]
    config.stack = config_for(Stack, num_layers=NUM_LAYERS * len(layers), pattern=pattern, shared=list(shared))
    return config


def experts() -> Config:
    """Return a model of MoE blocks whose router has everything that a schedule must pass through.

    That is auxiliary losses, noise, and a bias that each step moves. Attention has sinks; experts have biases.
    """
    config = tied(None)
    moe = mixture(experts=4, top_k=2, hidden=24, balance=0.3)
    moe.router.z = 0.03
    moe.router.jitter = 0.1
    moe.router.score = "sigmoid"
    moe.router.bias_rate = 0.05
    moe.router.logit_bias = True
    moe.experts.bias = True
    config.stack.pattern[0].mlp = moe
    config.stack.pattern[0].attention.sinks = True
    return config


MODELS = {  # each with a clipping threshold that is active in some steps and not in others
    "tied": (tied(None), 4.5),
    "recurrent": (tied(Recurrent), 1.1),
    "twins": (tied(Twins), 1.5),
    "shared": (tied(None, None, shared=(1,)), 7.3),
    "streams": (tied(None, None, shared=(1,)), 7.5),
    "experts": (experts(), 3.0),
    "latent": (with_latents(tied(None)), 4.6),
}
MODELS["streams"][0].stack.streams = "float32"  # float64 when the model computes in float64


class ExactnessCase(NamedTuple):
    """One combination of settings to train with."""

    model: str = "tied"
    optimizer: str = "adamw"
    memory: str = "after_backward"
    placement: str = "device"
    remat: str = "none"
    mesh: str = "one"
    precision: str = "float64"
    microbatches: int = 1
    layers: str = "alike"  # or "unlike": offloading and remat vary along the stack

    @property
    def is_many_programs(self) -> bool:
        """Return whether the schedule is layer_programs."""
        return SCHEDULES[self.memory][0]["update"] == "layer_programs"

    def is_tried(self) -> bool:
        """Return whether the tests run this combination.

        Other models and bfloat16 run with AdamW only. Microbatches are left out with buffers, because each microbatch
        sees the buffers that the previous one left, and with bfloat16 gradients, because the sum of rounded gradients
        is not the rounded sum.
        """
        if "experts" in PLACEMENTS[self.placement]:
            return False
        usual = self.model == "tied" and self.precision != "bfloat16"
        parts = usual and self.memory not in NO_PARTS
        if self.memory == "after_backward" and {"parameters", "activations"} & {*PLACEMENTS[self.placement]}:
            return False
        keeps_weights = self.memory.removesuffix("_together") in (DELAYED, SPECULATIVE)
        if keeps_weights and "parameters" in PLACEMENTS[self.placement]:
            return False
        inverts = self.remat == "invert"
        if inverts != (self.model == "streams") or (inverts and "activations" in PLACEMENTS[self.placement]):
            return False
        one = self.model == "tied" or self.precision == "float64"
        # layer_programs uses memory.activations instead.
        one &= not (self.is_many_programs and self.remat == "offload")
        return one and (usual or self.optimizer == "adamw") and (parts or self.microbatches == 1)

    def clip(self) -> float | None:
        """Return the maximum global norm, or None if the schedule has no clipping by global norm."""
        return SCHEDULES[self.memory][1].get("clip", MODELS[self.model][1])

    def program(self, **changed: Any) -> Program:
        """Return the framework's program for this case; `changed` overrides fields of config.learner."""
        model, (memory, learner) = MODELS[self.model][0].copy(), SCHEDULES[self.memory]
        model.param_dtype, master, _ = PRECISIONS[self.precision]
        model.compute_dtype = "float64"
        learner = {"clip": self.clip(), "accumulate": self.microbatches, "master_dtype": master, **learner, **changed}
        memory = {**memory, **dict.fromkeys(PLACEMENTS[self.placement], "pinned_host"), "remat": self.remat}
        if self.layers == "unlike":
            memory = self._by_layer(memory, len(model.stack.pattern))
        optimizer = (OPTIMIZERS | SMALL)[self.optimizer].copy()
        mesh = (MESHES | SHARED_ROWS)[self.mesh]
        if mesh is not None:
            mesh = MODEL_MESHES.get((self.mesh, self.model), mesh)
        return small.program(small.experiment(model, mesh=mesh, memory=memory, optimizer=optimizer, **learner))

    def _by_layer(self, memory: dict[str, Any], pattern_length: int) -> dict[str, Any]:
        """Return the fields of config.memory with a different number of the UNITS layers for each placement."""
        shares = {"optimizer_state": 0.5, "parameters": 0.25, "activations": 0.75, "gradients": 0.5, "experts": 0.75}
        memory = dict(memory)
        for field, share in shares.items():
            if memory.get(field) == "pinned_host":
                memory[field] = f"pinned_host:{share}"
        # layer_programs inverts all layers or none.
        if not (self.remat == "invert" and self.is_many_programs):
            other = "save:attention" if self.remat == "full" else "full"
            memory["remat"] = f"{self.remat}:{2 * pattern_length},{other}"
        return memory


def get_case_id(case: ExactnessCase) -> str:
    """Return the test id of a case."""
    texts = [str(value) for value in case]
    # "alike" is the default, so it is left out.
    return "-".join(texts if case.layers == "unlike" else texts[:-1])


def list_cases(**axes: Any) -> list[ExactnessCase]:
    """Return all combinations of these values that the tests run."""
    cases = [ExactnessCase(**dict(zip(axes, values, strict=True))) for values in product(*axes.values())]
    return [case for case in cases if case.is_tried()]


def cover_value_pairs(cases: list[ExactnessCase], chosen: Sequence[ExactnessCase] = ()) -> list[ExactnessCase]:
    """Return a pairwise cover: every pair of values that occurs in `cases` occurs in it or in `chosen`; greedy."""
    pairs_by_case = {case: _get_value_pairs(case) for case in cases}
    missing_pairs = set().union(*pairs_by_case.values()).difference(*map(_get_value_pairs, chosen))
    covering_cases = []

    def loss(case: ExactnessCase) -> int:
        return -len(pairs_by_case[case] & missing_pairs)

    for case in _cover_greedily(cases, loss):
        if not missing_pairs:
            break
        covering_cases.append(case)
        missing_pairs -= pairs_by_case[case]
    return covering_cases


def _cover_greedily(cases: list[ExactnessCase], loss: Callable[[ExactnessCase], Any]) -> Iterator[ExactnessCase]:
    """Yield the remaining case with the smallest loss, again and again; the first one if losses are equal.

    The loss of a case never falls as others are yielded. So an earlier loss is a lower bound, and most losses need not
    be recomputed (accelerated greedy, Minoux 1978).
    """
    bounds = [(loss(case), index) for index, case in enumerate(cases)]
    heapq.heapify(bounds)
    while bounds:
        _, index = heapq.heappop(bounds)
        current = (loss(cases[index]), index)
        if bounds and bounds[0] < current:
            heapq.heappush(bounds, current)
        else:
            yield cases[index]


@cache
def _get_value_pairs(case: ExactnessCase) -> set[Any]:
    """Return all pairs of values of a case.

    A placement counts as three values: whether state, weights and boundaries are offloaded. As a whole it is paired
    only with the schedule and the mesh.
    """
    places = {field: field in PLACEMENTS[case.placement] for field in PLACEMENTS["all"]}
    values = {**case._asdict(), **places}
    whole = {("placement", case.placement, field, values[field]) for field in ("memory", "mesh")}
    del values["placement"]
    return set(combinations(values.items(), 2)) | whole


def cover_each_value(cases: list[ExactnessCase]) -> list[ExactnessCase]:
    """Return a few cases that contain every value of every axis that occurs in `cases`; greedy.

    Rare values weigh more: if they were left for last, each would need an extra case. Among equally good cases, the one
    with the most new pairs of values is chosen.
    """
    values_by_case = {case: set(case._asdict().items()) for case in cases}
    pairs_by_case = {case: _get_value_pairs(case) for case in cases}
    frequencies = Counter(value for values in values_by_case.values() for value in values)
    missing_values = set(frequencies)
    met_pairs: set[Any] = set()
    chosen_cases = []

    def loss(case: ExactnessCase) -> tuple[float, int]:
        new_values = values_by_case[case] & missing_values
        # fsum does not depend on the iteration order of a set, which differs between pytest-xdist processes.
        return -math.fsum(1.0 / frequencies[value] for value in new_values), -len(pairs_by_case[case] - met_pairs)

    for case in _cover_greedily(cases, loss):
        if not missing_values:
            break
        chosen_cases.append(case)
        missing_values -= values_by_case[case]
        met_pairs |= pairs_by_case[case]
    return chosen_cases


@contextmanager
def enable_exact_numerics() -> Iterator[None]:
    """Enable float64, and lower thresholds: offload leaves from 256 bytes, split into row blocks from 256 elements."""
    threshold = mock.patch.dict(layout.move_to_host.__kwdefaults__, min_bytes=256)
    with jax.enable_x64(True), threshold, mock.patch.multiple(chunked_update, _SMALL=256, BLOCK=256, _ROWS=4):
        yield


# --- Both sides return (parameters and buffers, losses, norms). ------------------------------------------------------


@cache
def simplest(model: str, optimizer: str, precision: str) -> tuple[Program, Any]:
    """Return a program on one device, and the initial state of all cases as numpy arrays."""
    program = ExactnessCase(model, optimizer, precision=precision).program()
    return program, jax.device_get(program.init())


def place_initial_state(case: ExactnessCase, program: Program) -> Any:
    """Return the initial state with a program's placement. Groups that only some schedules have start as zeros."""
    _, first = simplest(case.model, case.optimizer, case.precision)
    places = jax.tree.map(lambda x: x.sharding, program.backend.abstract_checkpoint)
    return program.backend.from_checkpoint(jax.device_put(first, places))


def batch(program: Program, step: int) -> dict[str, jax.Array]:
    """Return the batch of a step; that of step POISONED has NaN weights."""
    found = small.host_batch(program, step)
    return program.put({**found, "weights": found["weights"] * np.float32(np.nan if step == POISONED else 1.0)})


def read_weights(program: Program, state: Any) -> Any:
    """Return a copy of the weights, with the update that a step has left; the state does not change."""
    if state.pending:
        copy = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), state)
        state = program.complete_update(copy)
    return jax.tree.map(np.array, program.backend.to_checkpoint(state).parameter)


def train(case: ExactnessCase) -> tuple[Any, list[float], list[float], list[Any]]:
    """Train with the framework; return the result and the weights before each step.

    Also checks that the state keeps its layout: offloaded leaves are back in host memory after each step.
    """
    program = case.program()
    for group, field in (("optimizer", "optimizer_state"), ("parameter", "parameters")):
        leaves = [leaf for leaf in program.layout if leaf.path.startswith(f"{group}/stack")]
        vectors = group == "optimizer" and case.optimizer in ("adafactor", "adalomo", "apollo_mini")  # factors
        offloaded = any(leaf.spec.is_offloaded for leaf in leaves)
        fields = {field, "experts"}
        assert offloaded == (bool(fields & {*PLACEMENTS[case.placement]}) and not vectors)
    if isinstance(program.backend, PerLayerStep):
        program.backend.jit = partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
        _ = program.backend.layers
        program.backend.compile()
    else:
        _compile(program, case)
    state, losses, norms, weights = place_initial_state(case, program), [], [], []
    for step in range(STEPS):
        weights.append(unstack_layers(read_weights(program, state)))
        state, metrics = program.step(state, batch(program, step))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    state = program.complete_update(state)
    program.layout.check(state)
    assert (int(state.counter["step"]), int(state.counter["skipped"])) == (STEPS, 1)
    state = program.backend.to_checkpoint(state)
    return (get_master_params(state), jax.device_get(state.buffer)), losses, norms, weights


def check_leaks(case: ExactnessCase) -> None:
    """Trace the case's programs and raise an exception if a tracer leaks.

    This is separate from `train`, because under checking_leaks JAX caches no traces and collects garbage after each.
    """
    program = case.program()
    if isinstance(program.backend, PerLayerStep):
        _ = program.backend.layers
        with jax.checking_leaks():
            program.backend.compile()
        return
    # A schedule's trial traces run here, before checking_leaks turns off caching.
    _ = program.jit_step.step_jit
    with jax.checking_leaks():
        _ = program.jit_step.traced_step


def _compile(program: Program, case: ExactnessCase) -> None:
    traced = program.jit_step.traced_step
    # Only these cases have no other arrays in host memory.
    if PLACEMENTS[case.placement] in [(), ("activations",)] and not case.memory.startswith("hosted_gradients"):
        assert ("<host>[" in str(traced.jaxpr)) == ("boundaries" in case.placement or case.remat == "offload")
    lowered = traced.lower()
    # With excess precision, bfloat16 gradients would be rounded in one program but not in the other.
    program.backend.compiled_step = lowered.compile({"xla_allow_excess_precision": False})


def plain(model: str, optimizer: str, precision: str, clip: float | None, weights: Any = None) -> Any:
    """Train the reference, skipping a bad step explicitly. Gradients are taken at `weights` if they are given."""
    program, first = simplest(model, optimizer, precision)
    gradients, (init, update) = compile_gradients(model, precision), build_update(model, optimizer, precision)
    key = jax.random.wrap_key_data(jnp.asarray(first["counter"]["rng"]))
    params, buffers = jax.device_put((get_master_params(first), first["buffer"]), program.replicated)
    state, losses, norms = jax.device_put(init(params), program.replicated), [], []
    for step in range(STEPS):
        at = weights[step] if weights else params
        (loss, out), grads = gradients(at, buffers, batch(program, step), jax.random.fold_in(key, step))
        norm = np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(grads)))
        losses.append(float(loss))
        norms.append(float(norm))
        if np.isfinite(loss) and np.isfinite(norm):
            params, state = update(params, state, grads, np.minimum(1.0, clip / norm if clip else 1.0))
            buffers = out.layer_state
    return jax.device_get((params, buffers)), losses, norms


once = cache(plain)


@cache
def compile_gradients(model: str, precision: str) -> Any:
    """Return the compiled function (unstacked parameters, buffers, batch, key) -> ((loss, Out), gradients)."""
    built = simplest(model, "adamw", precision)[0].experiment.model

    def compute_loss(params: Any, buffers: Any, batch: Any, key: jax.Array) -> Any:
        rows, targets = jnp.arange(batch["tokens"].shape[0]), jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        ctx = Context(batch, key, rows=rows, num_targets=targets, training=True, compute_dtype=built.compute_dtype)
        together = {}
        for stage in STACKS & params.keys():
            together[stage] = jax.tree.map(lambda *layers: jnp.stack(layers), *params[stage])
        return built.loss({**params, **together}, ctx, buffers)

    options = {"xla_allow_excess_precision": False}
    return jax.jit(jax.value_and_grad(compute_loss, has_aux=True), compiler_options=options)


@cache
def build_update(model: str, optimizer: str, precision: str) -> Any:
    """Return jitted plain optax: init, and (parameters, state, gradients, factor) -> (parameters, state)."""
    plain = (OPTIMIZERS | SMALL)[optimizer].instantiate()
    if isinstance(plain, PartitionedGradientTransformation):
        plain = update_per_layer(plain, *simplest(model, optimizer, precision))

    def update(params: Any, state: Any, grads: Any, factor: jax.Array) -> Any:
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype) * factor.astype(p.dtype), grads, params)
        changes, state = plain.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    return jax.jit(plain.init), jax.jit(update)


def update_per_layer(optimizer: PartitionedGradientTransformation, program: Program, first: Any) -> Any:
    """Apply one of Plimsoll's optimizers per stage and layer, with its parameters' roles, its own state and a seed."""
    learner, run = program.experiment.learner, fold(*first["counter"]["rng"])
    specs = {group.stage: learner.get_layer_update(group).optimizer.layer_specs for group in learner.groups}
    own = {
        stage: optimizer.fit_to_specs(tree) if optimizer.fit_to_specs else optimizer for stage, tree in specs.items()
    }

    def each(tree: Any, visit: Any) -> Any:
        units = {stage: unit if isinstance(unit, list) else [unit] for stage, unit in tree.items()}
        return {stage: [visit(stage, i, unit) for i, unit in enumerate(many)] for stage, many in units.items()}

    def update(grads: Any, state: Any, params: Any) -> Any:
        params = each(params, lambda stage, i, unit: unit)

        def one(stage: str, layer: int, unit: Any) -> Any:
            rounding_seed = {"seed": fold_name(fold(run, layer), stage)} if optimizer.draws else {}
            return own[stage].update(unit, state[stage][layer], params[stage][layer], **rounding_seed)

        both = each(grads, one)
        changes = {stage: [new for new, _ in units] for stage, units in both.items()}
        changes = {stage: many if isinstance(grads[stage], list) else many[0] for stage, many in changes.items()}
        return changes, {stage: [kept for _, kept in units] for stage, units in both.items()}

    return optax.GradientTransformation(
        lambda params: each(params, lambda stage, i, unit: own[stage].init(unit)), update
    )


def unstack_layers(params: Any) -> Any:
    """Return the parameters with each stack as a list of per-layer trees."""
    lists = {}
    for stage in STACKS & params.keys():
        num_repeats = jax.tree.leaves(params[stage])[0].shape[0]
        lists[stage] = [jax.tree.map(lambda x, i=i: x[i], params[stage]) for i in range(num_repeats)]
    return {**params, **lists}


def get_master_params(state: Any) -> Any:
    """Return a state's unstacked parameters, or its master copies, whose casts must equal the parameters."""
    weights, entries = jax.device_get((state.parameter, state.optimizer))
    masters = {stage: entries[stage]["default"].get("master", weights[stage]) for stage in weights}
    jax.tree.map(lambda m, w: np.testing.assert_array_equal(m.astype(w.dtype), w), masters, weights)
    return unstack_layers(masters)


def differences(actual: Any, expected: Any) -> dict[str, float]:
    """Return {path: max|a - b| / max|b|} for each leaf; in an unstacked tree, for one layer's tensor.

    If the expected leaf is zero, the absolute error is returned, so zeros must be zeros. The error is relative to a
    leaf because its elements were rounded at one scale. Relative to themselves, elements near zero would show only the
    rounding of the others; relative to the whole model, a small leaf could be completely wrong.
    """
    leaves = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(expected).items()}
    errors = jax.tree.map(lambda a, b: np.abs(np.asarray(a, np.float64) - b).max(), flatten(actual), leaves)
    return {path: float(error / (np.abs(leaves[path]).max() or 1.0)) for path, error in errors.items()}
