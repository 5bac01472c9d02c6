"""Random experiments: the framework's losses, norms and weights match a float64 reference with plain optax.

More seeds: `python -m tests.oracle --seeds 0:200`.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from plimsoll.framework.layers import kernels_xla
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
    Mixture,
    Model,
    Norm,
    Optimizer,
    Phase,
    RandomExperiment,
    Router,
    Rule,
)

FOLDER = Path(generator.__file__).parent
REFERENCE = ("experiments", "optimizers", "batches", "parameters", "mlp64", "model64", "training64")
# In this order: mixtures on two shards of experts, and adapters on 8-bit weights; one layer with offloaded gradients;
# an update in the backward pass.
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
    assert printed.endswith("1 agree, 0 refused, 0 disagree\n")


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
    assert {one.learner.clip_mode for one in experiments} == {
        "global_norm", "previous_norm", "update_rms", "norm_growth",
    }  # fmt: skip
    mixtures = [layer.mlp for one in experiments for layer in one.model.layers if isinstance(layer.mlp, Mixture)]
    assert {one.router.experts for one in mixtures} == {2, 3, 4, 5}
    assert {one.router.score for one in mixtures} == {"softmax", "softmax_chosen", "sigmoid"}
    assert {one.router.balance_over for one in mixtures if one.router.balance} == {"sequence", "batch"}
    for rare in (
        lambda one: one.model.lora is not None and "experts" in one.model.lora.targets,
        lambda one: any(isinstance(layer.mlp, Mixture) and layer.mlp.shared for layer in one.model.layers),
        lambda one: one.model.lora is not None,
        lambda one: one.model.shared,
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
    assert printed.endswith("0 agree, 0 refused, 1 disagree\n")
