"""Random experiments: the framework's losses, norms and weights match a float64 reference with plain optax.

More seeds: `python -m tests.oracle --seeds 0:200`.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from plimsoll.framework.layers import gated_delta_net, gated_delta_rule, kernels_xla, linear_attention, mamba2
from plimsoll.framework.models.chain import Chain
from plimsoll.framework.program.jit_step import JitStep
from tests.oracle import __main__ as command
from tests.oracle import compare, generator, subject, training64
from tests.oracle.experiments import (
    MLP,
    Attention,
    Data,
    Layer,
    Learner,
    LinearAttention,
    Mixture,
    Model,
    Norm,
    Optimizer,
    Phase,
    RandomExperiment,
    Router,
    Rule,
    StateSpace,
)

FOLDER = Path(generator.__file__).parent
REFERENCE = ("experiments", "optimizers", "batches", "parameters", "delta64", "ssm64", "mlp64", "model64", "training64")
# In this order: linear attention, mixtures on two shards of experts, and adapters on 8-bit weights; one state-space
# layer with offloaded gradients; an update in the backward pass.
QUICK = (1, 28, 53)
SLOW = tuple(seed for seed in range(10) if seed not in QUICK)


PLAIN = RandomExperiment(
    seed=1,
    model=Model(
        dim=8,
        vocab=16,
        layers=(Layer(Attention(heads=2, kv_heads=1, head_dim=4, window=5), MLP(hidden=8)),),
        repeats=2,
        tied=True,
        head_norm=Norm("layer"),
    ),
    learner=Learner(
        Optimizer("adamw", 1e-2, {"eps": 1e-4, "weight_decay": 0.1}), clip=0.7, rules=(Rule("norm", set={"b1": 0.8}),)
    ),
    data=Data(seq_len=8, batch=4, documents=True, poisoned=1),
    phases=(Phase(mesh={"data": 1, "fsdp": 1, "seq": 1, "model": 1}),),
    steps=3,
)


@pytest.fixture(autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    yield
    compare.drop_caches()


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_does_not_import_the_framework(name: str):
    nodes = list(ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    ours = {module for module in modules if module.split(".")[0] in ("tests", "framework", "configs")}
    assert ours <= {f"tests.oracle.{reference}" for reference in REFERENCE}
    assert {module.split(".")[0] for module in modules - ours} <= {"jax", "numpy", "optax", "ml_dtypes"} | set(
        sys.stdlib_module_names
    )


@pytest.mark.once("53")
@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_a_random_experiment_equals_float64_and_plain_optax(seed: int, capsys: pytest.CaptureFixture[str]):
    """This runs the command line. The framework refuses none of these seeds."""
    code = command.main([f"--seeds={seed}:{seed + 1}"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert printed.endswith("1 agree, 0 refused, 0 unstable, 0 disagree\n")


@pytest.mark.pairs
def test_an_experiment_that_amplifies_rounding_is_unstable(capsys: pytest.CaptureFixture[str]):
    """In seed 1018, a unit next to the kink of its ReLU turns float32 rounding into another gradient."""
    assert command.main(["--seed=1018"]) == 0
    assert "seed 1018: unstable: rounding changes the result by" in capsys.readouterr().out


def test_sampling_is_seeded_and_covers_all_options():
    experiments = [generator.draw(seed) for seed in range(200)]
    assert experiments[17] == generator.draw(17)
    phases = [phase for one in experiments for phase in one.phases]
    for name in ("update", "gradients", "optimizer_state", "parameters", "activations", "accumulate"):
        values = {str(getattr(phase, name)) for phase in phases}
        kinds = {value.partition(":")[0] for value in values}
        assert len(kinds) == {"update": 4, "gradients": 3, "accumulate": 4}.get(name, 2), name
        # Placements are for all layers, for a number of layers, or for a fraction of them.
        assert (len(values) > len(kinds)) == (name not in ("update", "accumulate")), name
    for axis in ("data", "fsdp", "expert", "seq", "model"):
        assert {phase.mesh[axis] for phase in phases} >= {1, 2, 4}, axis
    # Weights are sharded over both axes.
    shared_rows = [phase for phase in phases if phase.mesh["fsdp"] > 1 and phase.mesh["seq"] > 1]
    assert {phase.update for phase in shared_rows} == {phase.update for phase in phases}
    assert {one.learner.clip_mode for one in experiments} == {
        "global_norm", "previous_norm", "update_rms", "norm_growth",
    }  # fmt: skip
    mixtures = [layer.mlp for one in experiments for layer in one.model.layers if isinstance(layer.mlp, Mixture)]
    assert {one.router.experts for one in mixtures} == {2, 3, 4, 5}
    assert {one.router.score for one in mixtures} == {"softmax", "softmax_chosen", "sigmoid"}
    assert {one.router.balance_over for one in mixtures if one.router.balance} == {"sequence", "batch"}
    attentions = [layer.attention for one in experiments for layer in one.model.layers]
    linear = [one for one in attentions if isinstance(one, LinearAttention)]
    assert {one.conv_width for one in linear} == {1, 2, 3, 4}
    assert {one.heads // one.key_heads for one in linear} == {1, 2, 3}
    assert {one.chunk for one in linear} == {1, 2, 3, 5, 64}
    spaces = [one for one in attentions if isinstance(one, StateSpace)]
    assert {one.groups for one in spaces} == {1, 2, 4}
    assert {one.conv_bias for one in spaces} == {True, False}
    assert {one.max_step for one in spaces} == {None, 1.0}
    softmax = [one for one in attentions if isinstance(one, Attention)]
    assert sum(one.output_gate for one in softmax) >= 10
    assert {one.rotary_dim for one in softmax} == {None, 2, 4, 6}
    has_linear = [{isinstance(layer.attention, LinearAttention) for layer in one.model.layers} for one in experiments]
    assert has_linear.count({True}) >= 10
    assert has_linear.count({True, False}) >= 10
    linear_phases = [
        phase for one, has in zip(experiments, has_linear, strict=True) if True in has for phase in one.phases
    ]
    assert {phase.update for phase in linear_phases} == {phase.update for phase in phases}
    for axis in ("data", "fsdp", "expert", "seq", "model"):
        assert {phase.mesh[axis] for phase in linear_phases} >= {1, 2}, axis
    # States pass between more devices than a layer has key heads to divide.
    passing = [
        isinstance(layer.attention, kind) and phase.mesh["seq"] * phase.mesh["model"] > getattr(layer.attention, heads)
        for kind, heads in ((LinearAttention, "key_heads"), (StateSpace, "heads"))
        for one in experiments
        for layer in one.model.layers
        for phase in one.phases
    ]
    assert sum(passing) >= 10
    for rare in (
        lambda one: one.model.lora is not None and "experts" in one.model.lora.targets,
        lambda one: any(isinstance(layer.mlp, Mixture) and layer.mlp.shared for layer in one.model.layers),
        lambda one: any(isinstance(layer.mlp, Mixture) and layer.mlp.shared_gate for layer in one.model.layers),
        lambda one: one.model.lora is not None,
        lambda one: one.model.shared,
        lambda one: one.model.logit_divisor and any(layer.branch_scale for layer in one.model.layers),
        lambda one: one.data.empty,
        lambda one: one.data.poisoned is not None,
        lambda one: one.learner.scope == "model",
        lambda one: len(one.phases) == 3,
        lambda one: any(phase.remat == "invert" for phase in one.phases),
        lambda one: any(phase.remat.endswith(",full") for phase in one.phases),
    ):
        assert sum(map(bool, map(rare, experiments))) >= 2


@pytest.mark.pairs
@pytest.mark.parametrize(
    "phase",
    [Phase(update="layer_programs", remat="full"), Phase(update="streamed", remat="full", activations="pinned_host")],
    ids=lambda phase: phase.update,
)
def test_shared_frozen_layer_is_saved_only_once(phase: Phase):
    """The shared weights are an argument of each backward pass: under full, only a layer's input is saved."""
    layer, mesh = PLAIN.model.layers[0], PLAIN.phases[0].mesh
    shared_layer = replace(layer, mlp=MLP(hidden=28))
    model = replace(PLAIN.model, layers=(layer, shared_layer), repeats=3, shared=(1,))
    learner = replace(PLAIN.learner, rules=(Rule("^shared/block1/mlp/", freeze=True),))
    drawn = replace(PLAIN, model=model, learner=learner, phases=(replace(phase, mesh=mesh),), steps=1)
    with compare.enable_exact_numerics():
        program = subject.build_program(drawn, drawn.phases[0])
        if isinstance(program.backend, JitStep):
            assert "[3,28,8]" not in str(program.jit_step.traced_step.jaxpr), "stacked copies of the shared weight"
    verdict = compare.compare_seed(drawn)
    assert verdict.outcome == "agree", verdict.detail


@pytest.mark.pairs
def test_layers_run_one_by_one_on_more_devices_than_a_head_has_frequencies():
    """Rotary frequencies are saved whole for the backward pass, not sharded like the rows of a batch."""
    layer = replace(PLAIN.model.layers[0], attention=Attention(heads=1, kv_heads=1, head_dim=4, rope_theta=10.0))
    phase = Phase(mesh={"data": 4, "fsdp": 1, "seq": 1, "model": 1}, update="layer_programs", remat="full")
    verdict = compare.compare_seed(
        replace(PLAIN, model=replace(PLAIN.model, layers=(layer,)), phases=(phase,), steps=1)
    )
    assert verdict.outcome == "agree", verdict.detail


@pytest.mark.pairs
def test_shared_layer_microbatches_donate_in_layer_programs():
    """JAX warns if a donated buffer cannot be reused, and warnings are errors."""
    model = replace(PLAIN.model, layers=PLAIN.model.layers * 2, repeats=1, shared=(0,))
    phase = Phase(mesh=PLAIN.phases[0].mesh, update="layer_programs", accumulate=2)
    verdict = compare.compare_seed(replace(PLAIN, model=model, phases=(phase,), steps=1))
    assert verdict.outcome == "agree", verdict.detail


# --- the comparison can fail -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected_result() -> training64.Result:
    with compare.enable_exact_numerics():
        return training64.train(PLAIN)


def without_the_tie(self: Chain, params: dict, stage: str, original=Chain.stage_params) -> dict:
    """Return the weights that the stage reads; a table that belongs to another stage gets no gradient."""
    own = original(self, params, stage)
    return {name: x if name in params.get(stage, {}) else jax.lax.stop_gradient(x) for name, x in own.items()}


def slightly_faster(drawn: RandomExperiment) -> RandomExperiment:
    optimizer = replace(drawn.learner.optimizer, rate=1.001e-2)
    return replace(drawn, learner=replace(drawn.learner, optimizer=optimizer))


def wider_window(drawn: RandomExperiment) -> RandomExperiment:
    layer = drawn.model.layers[0]
    layer = replace(layer, attention=replace(layer.attention, window=6))
    return replace(drawn, model=replace(drawn.model, layers=(layer,)))


@pytest.mark.once("segments")
@pytest.mark.parametrize("broken", ["nothing", "learning rate", "window", "segments", "tie"])
def test_framework_bugs_are_detected(broken: str, expected_result: training64.Result, monkeypatch: pytest.MonkeyPatch):
    drawn = {"learning rate": slightly_faster, "window": wider_window}.get(broken, lambda same: same)(PLAIN)
    if broken == "segments":
        monkeypatch.setattr(kernels_xla, "separate_padding", lambda segments: None)
    if broken == "tie":
        monkeypatch.setattr(Chain, "stage_params", without_the_tie)
    with compare.enable_exact_numerics():
        found = subject.train(drawn, [subject.build_program(drawn, drawn.phases[0])])
    largest = max(compare.differences(PLAIN, found, expected_result).values())
    assert largest <= 1.0 if broken == "nothing" else largest > 100.0, largest


@pytest.mark.pairs
@pytest.mark.parametrize(("field", "value"), [("scale", 1.001), ("balance", 0.11), ("balance_over", "batch")])
def test_mixture_bugs_are_detected(field: str, value: float | str):
    router = Router(experts=4, top_k=2, normalize=False, balance=0.1)
    layer = PLAIN.model.layers[0]

    def with_router(router: Router) -> RandomExperiment:
        mixture = Mixture(router, MLP(hidden=8))
        return replace(PLAIN, model=replace(PLAIN.model, layers=(replace(layer, mlp=mixture),)))

    drawn, broken = with_router(router), with_router(replace(router, **{field: value}))
    with compare.enable_exact_numerics():
        expected_result = training64.train(drawn)
        found = subject.train(broken, [subject.build_program(broken, broken.phases[0])])
    assert max(compare.differences(drawn, found, expected_result).values()) > 100.0


def with_linear_attention() -> RandomExperiment:
    """Return PLAIN with a layer of linear attention before that of softmax attention."""
    attention = LinearAttention(heads=4, key_heads=2, key_dim=4, value_dim=3, chunk=3)
    layer = PLAIN.model.layers[0]
    return replace(PLAIN, model=replace(PLAIN.model, layers=(replace(layer, attention=attention), layer)))


def without_documents(
    state: jax.Array, inputs: Any, documents: Any, original=gated_delta_rule._run_blocks
) -> tuple[jax.Array, jax.Array]:
    """Run the recurrence as if each row were one document."""
    return original(state, inputs, jax.tree.map(jnp.zeros_like, documents))


def without_borders(
    x: jax.Array, earlier: jax.Array, taps: jax.Array, *segments: Any, bias_E: Any, original=linear_attention.convolve
) -> jax.Array:
    """Apply the convolution across the borders of documents."""
    return original(x, earlier, taps, None, bias_E=bias_E)


def with_slower_decay(
    self: gated_delta_net.GatedDeltaNet, *arguments: Any, original=gated_delta_net.GatedDeltaNet._compute_rates
) -> tuple[jax.Array, jax.Array]:
    beta, log_decay = original(self, *arguments)
    return beta, 0.999 * log_decay


@pytest.mark.once("state")
@pytest.mark.parametrize("broken", ["nothing", "state", "convolution", "unit", "decay"])
def test_bugs_of_linear_attention_are_detected(broken: str, monkeypatch: pytest.MonkeyPatch):
    drawn = with_linear_attention()
    if broken == "state":
        monkeypatch.setattr(gated_delta_rule, "_run_blocks", without_documents)
    if broken == "convolution":
        monkeypatch.setattr(linear_attention, "convolve", without_borders)
    if broken == "unit":
        monkeypatch.setattr(gated_delta_net, "_UNIT_EPS", 1e-3)
    if broken == "decay":
        monkeypatch.setattr(gated_delta_net.GatedDeltaNet, "_compute_rates", with_slower_decay)
    with compare.enable_exact_numerics():
        expected_result = training64.train(drawn)
        found = subject.train(drawn, [subject.build_program(drawn, drawn.phases[0])])
    largest = max(compare.differences(drawn, found, expected_result).values())
    assert largest <= 1.0 if broken == "nothing" else largest > 100.0, largest


def with_state_space(**changes: Any) -> RandomExperiment:
    """Return PLAIN with a state-space layer, and factors on branches and logits."""
    attention = StateSpace(heads=4, groups=2, state_dim=4, head_dim=3, chunk=3, min_step=0.3, max_step=1.0)
    layer = replace(PLAIN.model.layers[0], branch_scale=0.7)
    layers = (replace(layer, attention=replace(attention, **changes)), layer)
    return replace(PLAIN, model=replace(PLAIN.model, layers=layers, logit_divisor=0.6))


_NORMALIZE = mamba2.GatedRMSNorm.normalize


@pytest.mark.pairs
@pytest.mark.parametrize("broken", ["nothing", "state", "convolution", "groups", "max_step", "branch_scale", "logits"])
def test_bugs_of_state_spaces_are_detected(broken: str, monkeypatch: pytest.MonkeyPatch):
    drawn = given = with_state_space()
    if broken == "state":
        monkeypatch.setattr(gated_delta_rule, "_run_blocks", without_documents)
    if broken == "convolution":
        monkeypatch.setattr(linear_attention, "convolve", without_borders)
    if broken == "groups":
        norm = mamba2.GatedRMSNorm(dim=12, num_groups=1, eps=1e-5)
        monkeypatch.setattr(mamba2.GatedRMSNorm, "normalize", lambda self, *arrays: _NORMALIZE(norm, *arrays))
    if broken == "max_step":
        given = with_state_space(max_step=1.1)
    if broken == "branch_scale":
        layers = tuple(replace(layer, branch_scale=0.701) for layer in drawn.model.layers)
        given = replace(drawn, model=replace(drawn.model, layers=layers))
    if broken == "logits":
        given = replace(drawn, model=replace(drawn.model, logit_divisor=0.601))
    with compare.enable_exact_numerics():
        expected_result = training64.train(drawn)
        found = subject.train(given, [subject.build_program(given, given.phases[0])])
    largest = max(compare.differences(drawn, found, expected_result).values())
    assert largest <= 1.0 if broken == "nothing" else largest > 100.0, largest


@pytest.mark.pairs
@pytest.mark.parametrize(("rotary_dim", "agrees"), [(4, True), (2, False)])
def test_a_wrong_number_of_rotated_channels_is_detected(rotary_dim: int, agrees: bool):
    def with_rotated(channels: int) -> RandomExperiment:
        attention = Attention(heads=2, kv_heads=1, head_dim=6, rope_theta=10.0, rotary_dim=channels)
        return replace(PLAIN, model=replace(PLAIN.model, layers=(replace(PLAIN.model.layers[0], attention=attention),)))

    drawn, other = with_rotated(4), with_rotated(rotary_dim)
    with compare.enable_exact_numerics():
        expected_result = training64.train(drawn)
        found = subject.train(other, [subject.build_program(other, other.phases[0])])
    largest = max(compare.differences(drawn, found, expected_result).values())
    assert largest <= 1.0 if agrees else largest > 100.0, largest


def test_a_disagreement_names_seed_settings_tensor_and_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    verdict = compare.Verdict(3, "disagree", 12.0, "parameters: head/table", 1.0)
    monkeypatch.setattr(command, "compare_seed", lambda drawn: verdict)
    assert command.main(["--seeds=3:4"]) == 1
    printed = capsys.readouterr().out
    assert "seed 3: disagree: 1.2e+01 times the tolerance: parameters: head/table" in printed
    assert "    learner.optimizer.name = " in printed
    assert "    python -m tests.oracle --seed 3\n" in printed
    assert printed.endswith("0 agree, 0 refused, 0 unstable, 1 disagree\n")
