"""The estimate, compared with hand-computed sums, XLA's count where fusion is predictable, and compiled steps."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from plimsoll import configs
from plimsoll.framework.config import config_for
from plimsoll.framework.devices.accelerators import spec_for
from plimsoll.framework.layers import attention
from plimsoll.framework.layers.block import Block
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.stack import Stack
from plimsoll.framework.plan.device_trace import trace
from plimsoll.framework.plan.estimate import estimate, least_bytes
from plimsoll.framework.plan.jaxpr_analysis import flops
from plimsoll.framework.plan.liveness import CompilerRules, find_peak_bytes
from plimsoll.framework.plan.plan_report import BREAKDOWN_KEYS
from plimsoll.framework.plan.split_experiment import SplitExperiment
from plimsoll.framework.plan.step_time.device_rates import PRODUCT_EFFICIENCY
from plimsoll.framework.plan.step_time.estimated_time import estimate_time
from plimsoll.framework.plan.suggest import estimate_for_target
from plimsoll.framework.plan.targets import resolve
from plimsoll.framework.program.program import Program
from plimsoll.launch.cli import apply_overrides

B, D, F, L = 64, 32, 128, 6


def find_function_peak(function, *shapes, rules=CompilerRules()):
    return find_peak_bytes(jax.make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes)).jaxpr, rules)


def layers(h, ws):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)[0]


def test_products_are_stored_and_elementwise_ops_reuse_buffers():
    two = find_function_peak(lambda x, a, b: jnp.tanh(x @ a) @ b, (B, D), (D, F), (F, D))
    assert two.total() == 4 * (B * F + B * D)
    # A residual stream: x + f(x) needs x, which is an argument and not counted, and one result that is added in place.
    assert find_function_peak(lambda x, a, b: x + (x @ a) @ b, (B, D), (D, F), (F, D)).total() == 4 * (B * F + B * D)


def test_loop_holds_its_carry_and_one_iterations_result():
    assert find_function_peak(layers, (B, D), (L, D, D)).total() == 4 * (
        2 * B * D + D * D
    )  # a slice of the weights is a copy


def test_backward_holds_the_residuals_from_every_layer():
    def gradient(h, ws):
        return jax.grad(lambda ws: jnp.sum(layers(h, ws)))(ws)

    more = (
        find_function_peak(gradient, (B, D), (2 * L, D, D)).total()
        - find_function_peak(gradient, (B, D), (L, D, D)).total()
    )
    kept = more - L * D * D * 4  # the gradients, which have the weights' shape
    of_tanh = jax.tree.leaves(jax.vjp(jnp.tanh, jnp.ones((B, D)))[1])  # tanh; jax 0.10 also keeps 1 - tanh
    assert kept == L * 4 * (1 + len(of_tanh)) * B * D  # 1: the product's input


def test_xla_counts_the_same_for_products_in_a_row():
    def chain(x, a, b, c):
        return ((x @ a) @ b) @ c

    shapes = (256, 64), (64, 512), (512, 1024), (1024, 64)
    stats = jax.jit(chain).lower(*(jnp.ones(shape) for shape in shapes)).compile().memory_analysis()
    assert stats is not None
    assert (
        find_function_peak(chain, *shapes).total() == stats.temp_size_in_bytes
    )  # at the second product, before the result exists


# Settings of nanogpt-cpu with which its tables can be sharded over pipe.
PIPELINE = ["model.stack.unroll=1", "model.vocab_size=264", "learner.accumulate=4", "mesh.data=1"]
# Many small layers: their residuals are most of the memory, and a tick has those of an eighth of them.
CHUNKS = ["model.stack.num_layers=16", "mesh.pipe_chunks=4"]


def load(name, *settings):
    config = configs.load(name)
    for setting in settings:
        config.override(*setting.split("=", 1))
    return config.instantiate()


def estimate_on(experiment, devices, machine):
    return estimate(experiment, experiment.mesh.resolve(devices), spec_for(machine))


@pytest.mark.pairs
def test_the_state_is_exact():
    found = estimate_on(load("llama2-7b", "data.global_batch_size=16"), 16, "v5e")
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096  # sharded over fsdp
    norms = 65 * 4096  # replicated
    assert found.breakdown["parameters"] == 2 * matrices // 16 + 2 * norms
    counters = 4 * (2 * (1 + 32 + 1) + 1 + 32 + 1)  # one optimizer per stage, layer and rule
    assert found.breakdown["optimizer_state"] == pytest.approx(12 * matrices // 16 + 12 * norms, abs=4 * counters)
    assert found.breakdown["batch"] == 3 * 4 * 4096
    assert tuple(found.breakdown) == tuple(found.host_breakdown) == BREAKDOWN_KEYS
    assert found.peak_bytes == sum(found.breakdown.values())


@pytest.mark.pairs
def test_optimizer_state_in_host_memory_is_counted_there():
    resident = estimate_on(load("llama2-7b", "data.global_batch_size=16"), 16, "v5e")
    offloaded = estimate_on(
        load("llama2-7b", "data.global_batch_size=16", "memory.optimizer_state=pinned_host"), 16, "v5e"
    )
    assert (
        offloaded.host_bytes
        == offloaded.host_breakdown["optimizer_state"]
        > 0.99 * resident.breakdown["optimizer_state"]
    )
    assert offloaded.breakdown["optimizer_state"] + offloaded.host_bytes == resident.breakdown["optimizer_state"]


@pytest.mark.pairs
def test_estimate_matches_the_compiler_for_llama2_7b():
    """Llama 2 7B on eight chips: the real compiler needs 12.32 GiB of 15.75 (docs/benchmarks/plan_examples.md)."""
    settings = ["memory.remat=full", "data.global_batch_size=8", "memory.optimizer_state=pinned_host"]
    assert estimate_on(load("llama2-7b", *settings), 8, "v5e").peak_bytes == pytest.approx(12.32 * 2**30, rel=0.2)


@pytest.mark.pairs
def test_weights_and_inputs_in_host_memory():
    """Llama 2 7B on one chip holds the weights of two layers (one of them in transfer) and a table at the same time.

    The real compiler needs 1.231 GiB, and 1.635 for 13B (tools.bench.memory_table hosted-7b hosted-13b).
    """
    away = [f"memory.{field}=pinned_host" for field in ("gradients", "optimizer_state", "parameters", "activations")]
    settings = ["memory.update=streamed", *away, "memory.remat=full", "data.seq_len=2048", "data.global_batch_size=1"]
    for name, layers, width, compiled in (("llama2-7b", 32, 4096, 1.231), ("llama2-13b", 40, 5120, 1.635)):
        found = estimate_on(load(name, *settings), 1, "v5e")
        assert found.peak_bytes == pytest.approx(compiled * 2**30, rel=0.15)
        assert found.host_breakdown["activations"] == layers * 2048 * width * 2
        assert found.breakdown["parameters"] < 1 << 20  # vectors
        assert found.host_breakdown["parameters"] == found.host_breakdown["gradients"]
    kept = estimate_on(load("llama2-7b", *(setting for setting in settings if "activations" not in setting)), 1, "v5e")
    assert kept.breakdown["activations"] > 32 * 2048 * 4096 * 2
    assert kept.host_breakdown["activations"] == 0


@pytest.mark.parametrize("update", ["streamed", "layer_programs", "in_backward"])
def test_experts_in_host_memory(update):
    """The host has the experts' weights, gradients and state, and nothing else; the device has the rest."""
    machine = "h100" if update == "layer_programs" else "v5e"
    settings = [f"memory.update={update}", "memory.remat=full", "data.global_batch_size=1", "learner.clip=None"]
    settings += ["model.stack.num_layers=4", "model.vocab_size=1024", "data.tokenizer.vocab_size=1024"]
    offloaded = estimate_on(load("qwen3-30b-a3b", *settings, "memory.experts=pinned_host"), 1, machine)
    resident = estimate_on(load("qwen3-30b-a3b", *settings), 1, machine)
    experts = 4 * 128 * 3 * 2048 * 768
    host = offloaded.host_breakdown
    stored_gradients = 0 if update == "in_backward" else 2 * experts
    assert {key: size for key, size in host.items() if size} == {
        key: size
        for key, size in (
            ("parameters", 2 * experts), ("gradients", stored_gradients), ("optimizer_state", 12 * experts)
        )
        if size
    }  # fmt: skip
    for group, in_flight in (("parameters", 1), ("optimizer_state", 1)):
        # The weights of two layers, or a few chunks of state, are on the device too.
        least = resident.breakdown[group] - host[group]
        assert least <= offloaded.breakdown[group] <= least + in_flight * experts
    if update != "in_backward":
        # The gradients of everything else, and those of one layer's experts.
        others = resident.breakdown["parameters"] - 2 * experts
        assert offloaded.breakdown["gradients"] <= others + 2 * experts / 4 + 2**20
    if update == "layer_programs":
        # Two bytes per weight forward, two backward while gradients leave, and weights, gradients and state for the
        # update.
        assert offloaded.work.link_bytes == (2 + 2 + 2 + 2 + 12) * experts


@pytest.mark.pairs
def test_full_remat_saves_one_input_per_layer():
    def activations(count):
        settings = (f"model.stack.num_layers={count}", "data.global_batch_size=8", "memory.remat=full")
        return estimate_on(load("llama2-7b", *settings), 8, "h200").breakdown["activations"]

    assert activations(8) - activations(4) == 4 * 4096 * 4096 * 2


@pytest.mark.pairs
def test_saved_bytes_fall_as_recomputation_grows():
    def activations(*settings):
        return estimate_on(load("gpt2-350m", "data.global_batch_size=16", *settings), 4, "v6e").breakdown["activations"]

    policies = ["none", "dots", "save:query,key,value,attention", "full"]
    sizes = [activations(f"memory.remat={policy}") for policy in policies]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    assert activations("mesh.seq=2", "mesh.fsdp=2") < 2 * sizes[0]
    assert activations("learner.accumulate=2") < 0.6 * sizes[0]


@pytest.mark.pairs
def test_devices_that_share_rows_share_the_weights():
    """Weights and state take as many bytes as with rows of their own, and as many bytes travel for them."""

    def on_mesh(fsdp: int, seq: int):
        settings = (f"mesh.fsdp={fsdp}", f"mesh.seq={seq}", f"data.global_batch_size={fsdp}", "memory.remat=full")
        return estimate_on(load("gpt2-350m", *settings), 8, "v6e")

    own_rows, shared_rows = on_mesh(8, 1), on_mesh(2, 4)
    for group in ("parameters", "optimizer_state"):
        assert shared_rows.breakdown[group] == own_rows.breakdown[group] > 0
    # Each layer's keys and values travel too.
    kept = 24 * 1024 * 1024 * 2 * 8
    assert own_rows.work.received_bytes < shared_rows.work.received_bytes < own_rows.work.received_bytes + kept


@pytest.mark.pairs
def test_score_matrices_count_without_an_attention_kernel():
    flash, scores = (
        estimate_on(
            load("gpt2-124m", "data.global_batch_size=4", f"model.stack.pattern.0.attention.implementation={kernel}"),
            4,
            "h200",
        )
        for kernel in ("auto", "xla")
    )
    causal = 12 * 12 * (128 * sum(range(128, 1025, 128)))  # layers, heads, blocks of 128 rows by the keys they see
    assert scores.breakdown["activations"] - flash.breakdown["activations"] > causal * 2


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("name", "devices", "settings"),
    [
        ("nanogpt-cpu", 1, ["model.stack.num_layers=2"]),
        ("nanogpt-cpu", 4, ["model.stack.unroll=1", "mesh.data=2", "mesh.fsdp=2", "data.global_batch_size=64"]),
        ("stdlib-tiny", 2, ["mesh.data=1", "mesh.model=2", "learner.accumulate=2", "model.stack.unroll=1"]),
        ("moe-tiny", 1, ["model.stack.unroll=1", "model.stack.num_layers=2"]),
        ("moe-tiny", 4, ["model.stack.unroll=1", "mesh.data=1", "mesh.fsdp=2", "mesh.expert=2"]),
        ("nanogpt-cpu", 4, [*PIPELINE, "mesh.pipe=2", "mesh.fsdp=2", "data.global_batch_size=64"]),
        ("nanogpt-cpu", 4, [*PIPELINE, *CHUNKS, "mesh.pipe=2", "mesh.fsdp=2", "data.global_batch_size=64"]),
    ],
)
def test_the_compiler_agrees(name, devices, settings):
    experiment = load(name, *settings)
    program = Program(experiment, jax.devices()[:devices])
    stats = program.jit_step.compiled_step.memory_analysis()
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert estimate_on(experiment, devices, "cpu").peak_bytes == pytest.approx(
        total + stats.temp_size_in_bytes, rel=0.2
    )


SLICED = ["data.global_batch_size=64", "data.seq_len=1024", "memory.remat=full"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Weights are gathered twice and gradients scattered once: a chip gets its shard of the other slice's half.
        (["mesh.fsdp=16"], lambda parameters, activations: 3 * parameters),
        # The sum of gradients: half of each chip's shard both ways. The head's table is summed once more.
        (["mesh.data=2"], lambda parameters, activations: parameters + 2 * 32000 * 4096 / 2),
        # Each of M + P - 1 ticks moves activations and cotangents, and M all-reduces of two each sum up four arrays.
        (["mesh.pipe=2", "learner.accumulate=4"], lambda parameters, activations: (2 * (4 + 1) + 4 * 4) * activations),
    ],
)
def test_bytes_and_time_between_slices(settings, expected):
    target = resolve("2xv5e-8")
    experiment = load("llama2-7b", *SLICED, *settings)
    need = estimate_for_target(experiment, target)
    activations = 64 // (experiment.learner.accumulate * 8) * 1024 * 4096 * 2
    assert need.work.slice_bytes == pytest.approx(expected(need.breakdown["parameters"], activations), rel=0.03)
    is_pipeline = "mesh.pipe=2" in settings
    assert need.work.exposed_slice_bytes == (need.work.slice_bytes if is_pipeline else 0)
    time = estimate_time(need.work, target.spec, target.num_devices, "bfloat16")
    # 6.4 Tbps for 256 chips. What products hide counts a tenth.
    seconds = need.work.slice_bytes / 3.125e9
    assert time.other_slices == pytest.approx(seconds if is_pipeline else 0.1 * seconds)
    # Within one slice, nothing crosses.
    whole = estimate(experiment, experiment.mesh.resolve(16), spec_for("v5e"))
    assert whole.work.slice_bytes == 0
    assert estimate_time(whole.work, spec_for("v5e"), 16, "bfloat16").other_slices == 0


class Twice(Linear):
    """A custom layer of a user."""

    def __call__(self, weights, x, ctx):
        return super().__call__(weights, jnp.concatenate([x, x], -1)[..., : x.shape[-1]], ctx)


@pytest.mark.pairs
def test_tracing_user_layers_leaves_the_experiment_unchanged():
    config = configs.load("nanogpt-cpu")
    config.model.stack.pattern[0].mlp.linear = config_for(Twice, bias=True)
    config.model.vocab_size = 260
    experiment = config.instantiate()
    layers = [layer for layer in experiment.model.stack.pattern.walk() if isinstance(layer, attention.Attention)]
    num_heads = [layer.num_heads for layer in layers]
    # With two shards, the trace's copies of the layers have half of the heads.
    jaxpr = trace(SplitExperiment(experiment), {**experiment.mesh.resolve(1), "model": 2}, "cpu")
    assert [layer.num_heads for layer in layers] == num_heads
    assert "concatenate" in str(jaxpr)
    assert estimate(experiment, experiment.mesh.resolve(1), spec_for("cpu")).peak_bytes > 0


def test_equal_layers_are_traced_once(monkeypatch: pytest.MonkeyPatch):
    applied = []
    apply = Block.apply

    def record(self: Block, *arguments: Any) -> Any:
        applied.append(self)
        return apply(self, *arguments)

    monkeypatch.setattr(Block, "apply", record)
    experiment = configs.load("qwen3.5-tiny").instantiate()
    assert len(experiment.model.stages["stack"].pattern.layers) == 4
    trace(SplitExperiment(experiment), experiment.mesh.resolve(1), "cpu")
    # Three linear layers are equal, and there is one layer of attention.
    assert len(applied) == 2


@pytest.mark.pairs
def test_indivisible_sizes_are_refused():
    with pytest.raises(ValueError, match=r"mesh\.model = 3 does not divide num_kv_heads = 32"):
        estimate_on(load("llama2-7b", "mesh.model=3"), 12, "v5e")
    with pytest.raises(ValueError, match=r"nearest global_batch_size: \[8, 16\]"):
        estimate_on(load("llama2-7b", "data.global_batch_size=12"), 8, "v5e")


WORK = ("model.dim=256", "data.seq_len=128", "model.embed.max_positions=128", "data.global_batch_size=4")


@pytest.mark.pairs
def test_8_bit_products_take_less_time_and_memory():
    settings = ["data.global_batch_size=8", "mesh.fsdp=8", "memory.remat=none"]
    target = resolve("h100x8")
    plain = load("llama3-8b", *settings)
    rounded = load("llama3-8b", *settings, 'model.precision={"mlp|attention": "fp8_tensor"}')
    needs = [estimate_for_target(experiment, target) for experiment in (plain, rounded)]
    work = needs[1].work
    # Queries and outputs, keys and values, and three matrices of the MLP; each forward and twice backward.
    weights_per_layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    tokens_per_device = plain.data.global_batch_size * plain.data.seq_len / 8
    assert work.fp8_flops == 3 * 2 * 32 * weights_per_layer * tokens_per_device
    assert work.int8_flops == 0
    assert needs[0].work.fp8_flops == 0
    times = [estimate_time(need.work, target.spec, 8, "bfloat16") for need in needs]
    saved = work.fp8_flops / 2 / (PRODUCT_EFFICIENCY * target.spec.peak_bf16_flops)
    assert times[0].matrix_units - times[1].matrix_units == pytest.approx(saved, rel=0.01)
    assert needs[1].peak_bytes < needs[0].peak_bytes


@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_row"])
def test_8_bit_products_of_the_head(recipe):
    target = resolve("h100x8")
    settings = ["data.global_batch_size=8", "mesh.fsdp=8", "memory.remat=full", "model.stack.num_layers=2"]
    plain, rounded = (
        estimate_for_target(load("llama3-8b", *settings, *rules), target)
        for rules in ([], [f'model.precision={{"^head$": "{recipe}"}}'])
    )
    tokens_per_device = 8192
    assert rounded.work.fp8_flops == 3 * 2 * 128256 * 4096 * tokens_per_device
    assert rounded.work.flops == plain.work.flops
    if recipe == "fp8_tensor":
        assert rounded.peak_bytes < plain.peak_bytes


@pytest.mark.pairs
@pytest.mark.parametrize("remat", ["none", "dots", "dots_no_batch", "full", "save:query,mlp_up"])
def test_recomputation_flops_match_the_compiler(remat, monkeypatch):
    # XLA counts a loop as one iteration, so the stack is unrolled.
    monkeypatch.setattr(Stack, "is_unrolled", lambda stack, policy: True)
    experiment = load("nanogpt-cpu", *WORK, "model.stack.num_layers=2", "model.stack.unroll=0", f"memory.remat={remat}")
    program = Program(experiment, jax.devices()[:1])
    by_xla = program.jit_step.traced_step.lower().compile().cost_analysis()["flops"]
    assert estimate_on(experiment, 1, "cpu").flops.flops == pytest.approx(by_xla, rel=0.03)


@pytest.mark.parametrize("mesh", [{"data": 1}, {"expert": 4}, {"fsdp": 2, "expert": 2, "model": 2}])
def test_mixture_counts_only_active_experts(mesh):
    """Only the rows that an even router fills are counted, not the capacity."""
    devices = math.prod(mesh.values())
    settings = [f"mesh.{axis}={size}" for axis, size in {"data": 1, **mesh}.items()]
    experiment = load("moe-tiny", "data.global_batch_size=16", "model.stack.unroll=1", *settings)
    data = experiment.data
    expected = experiment.model.flops_per_token(data.seq_len) * data.global_batch_size * data.seq_len
    # Every device of the `model` axis routes all tokens of its group; the formula ignores the attention mask.
    assert estimate_on(experiment, devices, "cpu").flops.flops == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_exchange_receives_an_even_share_while_nothing_else_runs(factor):
    """An all-gather receives three times a device's tokens each way, which products may hide."""
    settings = ["mesh.data=1", "mesh.expert=4", "data.global_batch_size=16", "model.stack.unroll=1"]
    path = "model.stack.pattern.0.mlp.experts"
    gathered = load("moe-tiny", *settings, f"{path}.exchange=all_gather")
    exchanged = load("moe-tiny", *settings, f"{path}.exchange=all_to_all", f"{path}.buffer_factor={factor}")
    works = [estimate_on(experiment, 4, "cpu").work for experiment in (gathered, exchanged)]
    model, data = exchanged.model, exchanged.data
    experts = model.stack.pattern.layers["block0"].mlp.experts
    num_rows = data.global_batch_size * data.seq_len // 4 * experts.top_k
    # Tokens there and results back, and their gradients; shares in float32 there, and their gradients back.
    row_bytes = 4 * model.dim * jnp.dtype(model.compute_dtype).itemsize + 2 * 4
    assert len(model.stack.pattern.layers) == 1
    assert (
        works[1].exposed_received_bytes - works[0].exposed_received_bytes
        == model.stack.num_repeats * num_rows * 3 / 4 * row_bytes
    )
    assert works[1].flops == works[0].flops


@pytest.mark.pairs
def test_recomputation_is_the_stacks_products_without_the_last():
    by_policy = {
        remat: estimate_on(load("nanogpt-cpu", *WORK, f"memory.remat={remat}"), 1, "cpu").flops.flops
        for remat in ("none", "full", "sqrt:2")
    }
    tokens, dim, hidden, units = 4 * 128, 256, 512, 4
    # By hand: one token's multiply-adds in a layer's projections, attention over 128 positions (queries in two blocks;
    # the first block attends to the first half only), and MLP.
    down = hidden * dim
    unit = 4 * dim * dim + 3 * 128 * dim // 2 + hidden * dim + down
    # The layer's backward pass does not need the result of its last product.
    assert by_policy["full"] - by_policy["none"] == 2 * tokens * units * (unit - down)
    # In addition, each group of two layers is recomputed in a loop, so both layers completely.
    assert by_policy["sqrt:2"] - by_policy["full"] == 2 * tokens * units * unit


@pytest.mark.pairs
@pytest.mark.parametrize(
    "settings",
    [
        ("mesh.data=2", "mesh.fsdp=4", "memory.remat=full"),
        ("mesh.data=8", "learner.accumulate=2", "memory.remat=dots_no_batch"),
        ("memory.update=in_backward", "learner.clip_mode=two_pass", "learner.clip=1.0", "mesh.data=8"),
        ("memory.update=streamed", "memory.remat=full", "mesh.data=8"),
        (*PIPELINE, "mesh.pipe=2", "mesh.fsdp=4"),
        (*PIPELINE, "mesh.pipe=2", "mesh.pipe_chunks=2", "mesh.fsdp=4"),
        (*PIPELINE, "mesh.pipe=4", "mesh.model=2", "memory.remat=full"),
    ],
)
def test_flops_match_the_traced_step_on_any_mesh(settings):
    experiment = load("nanogpt-cpu", "data.global_batch_size=16", *settings)
    traced = flops(Program(experiment, jax.devices()).jit_step.traced_step.jaxpr).flops
    assert estimate_on(experiment, 8, "cpu").flops.flops == pytest.approx(traced, rel=0.02)


@pytest.mark.pairs
def test_two_passes_count_the_same_work_in_layer_programs():
    settings = ("data.global_batch_size=16", "mesh.data=8", "learner.clip_mode=two_pass", "learner.clip=1.0")
    in_backward = load("nanogpt-cpu", "memory.update=in_backward", *settings)
    by_layers = load("nanogpt-cpu", "memory.update=layer_programs", "memory.gradients=none", *settings)
    assert estimate_on(by_layers, 8, "cpu").flops == estimate_on(in_backward, 8, "cpu").flops


@pytest.mark.pairs
@pytest.mark.parametrize("update", ["after_backward", "streamed", "in_backward", "layer_programs"])
def test_the_least_is_never_more_than_the_estimate(update):
    # Most of the memory here is state, so a bound that counts anything twice would exceed the estimate.
    settings = ["data.global_batch_size=16", "data.seq_len=512", "memory.remat=full", "learner.clip=none"]
    for placed in ("device", "pinned_host"):
        placement = [f"memory.update={update}", f"memory.optimizer_state={placed}"]
        experiment = load("llama2-7b", *settings, *placement)
        sizes = experiment.mesh.resolve(16)
        need = estimate(experiment, sizes, spec_for("v5e"))
        state = need.breakdown["parameters"]
        if placed == "device":
            state += need.breakdown["optimizer_state"]
        assert state <= least_bytes(experiment, sizes) <= need.peak_bytes, (update, placed)


@pytest.mark.pairs
def test_table_with_8bit_layers_is_updated_by_rows():
    # The layers' optimizer works on blocks of 256 elements, that of the float32 tables elementwise. Compiled for v5e-1,
    # 7.22 GiB are alive at the peak. If a table were one chunk, it would be 19.57 GiB.
    config = configs.load("llama3-8b")
    overrides = [
        ("data.global_batch_size", "1"),
        ("learner.optimizer", "adamw8bit"),
        ("learner.optimizer.learning_rate", "3e-4"),
        ("learner.master_dtype", "None"),
        ("learner.rounding", "stochastic"),
        ("learner.clip_mode", "two_pass"),
        ("memory.update", "in_backward"),
        ("memory.remat", "full"),
        ("memory.optimizer_state", "pinned_host"),
        ("memory.parameters", "pinned_host"),
    ]
    apply_overrides(config, overrides)
    experiment = config.instantiate()
    need = estimate(experiment, experiment.mesh.resolve(1), spec_for("TPU v5 lite"))
    assert need.peak_bytes == pytest.approx(7.22 * 2**30, rel=0.05)
