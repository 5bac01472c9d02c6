"""Autotuning: the fastest settings that fit, the fields that it may change, and how it reports them."""

import dataclasses
import gc
import itertools
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from plimsoll import configs
from plimsoll.extras.autotune import ALLOWED
from plimsoll.extras.autotune.autotune import BATCH_MODE_FIXED, autotune, describe_largest_batch
from plimsoll.extras.autotune.cost_model import Candidate, CostModel, MemoryBudget, MemoryLimits
from plimsoll.extras.autotune.search import SettingsSearch
from plimsoll.extras.autotune.search_space import SearchSpace
from plimsoll.extras.autotune.settings import (
    MESH,
    Machine,
    TunedSettings,
    TuningRequest,
    find_fixed_paths,
    flags,
    get_text,
    list_changes,
    list_variants,
    parse_allowed,
    select_changes,
    setting,
    with_settings,
)
from plimsoll.extras.autotune.tuner import NoProgramError, Tuner, confirm_fastest
from plimsoll.framework.config import Config, ConfigError, config_for
from plimsoll.framework.families.decoders import mixture
from plimsoll.framework.layers.linear import Linear
from plimsoll.framework.layers.low_precision import RECIPES
from plimsoll.framework.objectives.kto import KTO
from plimsoll.framework.plan import targets
from plimsoll.framework.plan.device_trace import TraceCache
from plimsoll.framework.plan.estimate import estimate
from plimsoll.framework.plan.step_time.estimated_time import estimate_time
from plimsoll.framework.plan.suggest import estimate_for_target
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import plan

MIB = 2**20
HOSTED = ("memory.optimizer_state", "memory.gradients", "memory.parameters", "memory.activations")


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small_llama(layers: int = 4) -> Config:
    """Return a small Llama; with one or two microbatches on one chip the search is short."""
    config = configs.load("llama2-7b", shape_only=True)
    config.model.stack.num_layers = layers
    config.model.dim = 512
    config.model.vocab_size = config.data.tokenizer.vocab_size = 1024
    config.data.seq_len = 1024
    config.data.global_batch_size = 2
    return config


@cache
def traces(config_text: str, target: str) -> TraceCache:
    """Return traces shared by all searches of a config on a target; tracing takes most of a search's time."""
    return TraceCache()


def tuner(config: Config, target: str, device_mib: int, host_bytes: int = 2**40, **options: Any) -> Tuner:
    found = Tuner(config, targets.resolve(target), device_bytes=device_mib * MIB, host_bytes=host_bytes, **options)
    found.cost_model._traces = traces(config.to_json(), target)
    return found


def needs(config: Config, target: str) -> int:
    """Return the MiB of device memory that the unchanged config needs."""
    return estimate_for_target(config.instantiate(), targets.resolve(target)).peak_bytes // MIB


def offloads(candidate: Candidate) -> bool:
    return any("pinned_host" in text for _, text in candidate.settings)


# --- the search ------------------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_fitting_config_is_unchanged():
    config = small_llama()
    candidate = tuner(config, "v5e-1", 64 * needs(config, "v5e-1")).propose()
    assert candidate is not None
    assert not offloads(candidate)
    assert candidate.cost.moved == 0


def test_experts_may_move_first():
    """Only where a schedule can offload weights, only in a mixture of experts, and only if the user has not set it."""
    mixture_config = small_llama()
    mixture_config.model.stack.pattern[0].mlp = mixture(experts=4, top_k=2, hidden=64)

    def firsts(config: Config, update: str, *fixed: str) -> list[str | None]:
        """Return the field that each order offloads first."""
        space = SearchSpace(config, targets.resolve("v5e-1"), frozenset(fixed))
        return [levels[0].field for levels in space.offload_orders((setting("memory.update", update),))]

    usual = ["memory.optimizer_state", "memory.activations"]
    for update in ("streamed", "in_backward"):
        assert firsts(small_llama(), update) == usual
        assert firsts(mixture_config, update) == [*usual, "memory.experts"]
        assert firsts(mixture_config, update, "memory.experts") == usual
    assert firsts(mixture_config, "after_backward") == ["memory.optimizer_state"]


@pytest.mark.pairs
@pytest.mark.parametrize("target", ["v5e-1", "h100"])
def test_offloading_fills_the_device_up_to_its_limit(target: str):
    config = small_llama(layers=16)
    state = tuner(config, target, 10**6).cost_model.cost(())
    assert state is not None
    # Not even the state fits.
    device_mib = int(0.8 * state.state) // MIB
    candidate = tuner(config, target, device_mib).propose()
    assert candidate is not None
    assert offloads(candidate)
    assert 0.8 < candidate.peak / (device_mib * MIB) <= 0.98


@pytest.mark.pairs
@pytest.mark.parametrize("host_bytes", [2**40, 2**28], ids=["room on the host", "no room on the host"])
@pytest.mark.parametrize("share", [2.0, 0.6, 0.01])
def test_quick_check_agrees_with_the_whole_search(share: float, host_bytes: int):
    config = small_llama(layers=16)
    device_mib = int(share * needs(config, "h100"))
    checked = tuner(config, "h100", device_mib, host_bytes)
    searched = tuner(config, "h100", device_mib, host_bytes)
    assert checked.finds_any() == (searched.propose() is not None)
    assert checked.cost_model.count <= searched.cost_model.count


@pytest.mark.pairs
def test_search_is_deterministic():
    config = small_llama()
    device_mib = 2 * needs(config, "v5e-1") // 3
    first = tuner(config, "v5e-1", device_mib).propose()
    again = tuner(config, "v5e-1", device_mib).propose()
    assert first == again


@pytest.mark.pairs
def test_choice_does_not_change_training_results():
    config = small_llama()
    choice = tuner(config, "v5e-1", 2 * needs(config, "v5e-1") // 3).propose()
    assert choice is not None
    changed_config = with_settings(config, choice.settings)
    assert changed_config.data == config.data
    for field in ("optimizer", "clip", "master_dtype", "moment_dtype", "rounding", "ema"):
        assert changed_config.learner[field] == config.learner[field]


@pytest.mark.pairs
def test_nothing_is_faster_in_a_whole_small_space():
    """Compare the choice with an exhaustive search over meshes, microbatches, policies and placements."""
    config = small_llama()
    config.data.global_batch_size = 16
    target = targets.resolve("v5e-4")
    device_mib = needs(config, "v5e-4") // 3
    limits = MemoryLimits(device_mib * MIB, 2**40)
    cost_model = CostModel(config, target)
    budget = MemoryBudget(limits)
    found = SettingsSearch(cost_model, SearchSpace(config, target, frozenset()), budget).run()
    assert found is not None
    meshes = [
        (),
        (setting("mesh.fsdp", 2), setting("mesh.model", 2)),
        (setting("mesh.data", 2), setting("mesh.fsdp", 2)),
    ]
    places = [(), ("memory.optimizer_state",), ("memory.optimizer_state", "memory.gradients"), HOSTED]
    best = float("inf")
    for mesh, accumulate, remat, update, offloaded in itertools.product(
        meshes, (1, 2, 4), ("none", "dots", "full"), ("after_backward", "streamed"), places
    ):
        parts = [setting("learner.accumulate", accumulate), setting("memory.remat", remat)]
        parts += [setting("memory.update", update), *(setting(path, "pinned_host") for path in offloaded)]
        settings = select_changes(config, (*mesh, *parts))
        cost = cost_model.cost(settings)
        if budget.fits(settings, cost):
            assert cost is not None
            best = min(best, cost.seconds)
    assert best < float("inf")
    assert found.cost.seconds <= 1.03 * best


def small_mixture() -> Config:
    """Return `small_llama` with six experts in each layer."""
    config = small_llama()
    config.model.stack.pattern[0].mlp = mixture(experts=6, top_k=2, hidden=512)
    config.data.global_batch_size = 16
    return config


@pytest.mark.pairs
def test_offloaded_state_is_fetched_a_layer_ahead_where_that_is_faster():
    config = small_llama(8)
    config.model.dim = 1024
    config.data.seq_len = 4096
    config.data.global_batch_size = 1
    search = tuner(config, "v5e-1", 1100)
    candidate = search.propose()
    assert candidate is not None
    assert get_text(candidate.settings, "memory.prefetch") == "layer"
    others = tuple(one for one in candidate.settings if one.path != "memory.prefetch")
    in_chunks = search.cost_model.cost(others)
    assert in_chunks is not None
    assert candidate.cost.seconds < 0.95 * in_chunks.seconds


def test_expert_sharding_divides_the_expert_count():
    meshes = SearchSpace(small_mixture(), targets.resolve("v5e-4"), frozenset()).meshes()
    expert_sizes = {get_text(mesh, "mesh.expert") for mesh in meshes if mesh}
    assert expert_sizes == {"1", "2"}, "4 does not divide six experts"
    for mesh in meshes:
        if get_text(mesh, "mesh.expert") == "2":
            sizes = [int(text) for _, text in mesh]
            assert math.prod(sizes) == 4
            assert (get_text(mesh, "mesh.seq"), get_text(mesh, "mesh.model")) == ("1", "1")
    dense_meshes = SearchSpace(small_llama(), targets.resolve("v5e-4"), frozenset()).meshes()
    assert {get_text(mesh, "mesh.expert") for mesh in dense_meshes if mesh} == {"1"}


@pytest.mark.parametrize(
    ("router", "counts"),
    [
        ({}, [1, 2, 4]),
        ({"balance_over": "batch"}, [1]),
        ({"balance_over": "batch", "balance": 0.0}, [1, 2, 4]),
        ({"bias_rate": 0.001, "score": "sigmoid"}, [1, 2, 4]),
    ],
    ids=str,
)
def test_microbatches_are_chosen_where_they_change_no_number(router: dict[str, Any], counts: list[int]):
    config = small_mixture()
    for name, value in router.items():
        setattr(config.model.stack.pattern[0].mlp.router, name, value)
    assert SearchSpace(config, targets.resolve("v5e-4"), frozenset()).accumulations(()) == counts


def test_microbatch_dependent_loss_declares_it():
    config = small_llama()
    assert not config.model.instantiate().stages["head"].depends_on_microbatches
    config.model.head.objective = config_for(KTO)
    assert config.model.instantiate().stages["head"].depends_on_microbatches


@pytest.mark.parametrize(
    ("target", "rows", "stages"),
    [
        ("2xv5e-8", 64, {2}),
        ("4xv5e-8", 64, {2, 4}),
        ("v5e-16", 64, set()),
        ("v5e-16", 8, {2, 4}),
        ("h100x16", 64, set()),
    ],
)
def test_pipelines_are_searched_where_they_can_pay(target: str, rows: int, stages: set[int]):
    """Several slices, or more chips than rows. Four layers have at most four stages."""
    config = small_llama()
    config.data.global_batch_size = rows
    space = SearchSpace(config, targets.resolve(target), frozenset())
    pipelines = [dict(mesh) for mesh in space.meshes() if space.is_pipeline(mesh)]
    assert {int(mesh["mesh.pipe"]) for mesh in pipelines} == stages
    # A mesh of the user stays.
    assert SearchSpace(config, targets.resolve(target), frozenset({"mesh.fsdp", *MESH})).meshes() == [()]


@pytest.mark.pairs
def test_a_pipeline_is_chosen_if_the_network_between_slices_is_slow_enough():
    # With few tokens, activations are smaller than gradients.
    config = configs.load("llama2-7b", shape_only=True)
    config.data.seq_len = 1024
    config.data.global_batch_size = 16
    chosen = {}
    for rate in (1e12, 3.125e9):
        two_slices = targets.resolve("2xv5e-8")
        spec = dataclasses.replace(two_slices.spec, dcn_bytes_per_second=rate)
        slow = dataclasses.replace(two_slices, spec=spec)
        found = Tuner(config, slow, device_bytes=2**40, host_bytes=2**40)
        best = SettingsSearch(found.cost_model, found.space, found.budget).run()
        assert best is not None
        chosen[rate] = get_text(best.settings, "mesh.pipe")
    assert chosen == {1e12: None, 3.125e9: "2"}


def test_expert_sharding_costs_time():
    config = small_mixture()
    cost_model = CostModel(config, targets.resolve("v5e-4"))
    expert_mesh = tuple(setting(f"mesh.{axis}", size) for axis, size in {"data": 1, "fsdp": 2, "expert": 2}.items())
    cost = cost_model.cost(select_changes(config, expert_mesh))
    assert cost is not None
    assert cost.seconds > 0


@pytest.mark.pairs
def test_experts_wait_for_their_weights_on_tpu():
    """Steps wait for two all-gathers and an all-reduce (twice the traffic) of the experts' weights on other devices.

    A dense model has no such waits.
    """
    config = small_mixture()
    spec = targets.resolve("v5e-4").spec
    sizes = {"pipe": 1, "data": 1, "fsdp": 4, "expert": 1, "seq": 1, "model": 1}
    work = estimate(config.instantiate(), sizes, spec).work
    elements = 4 * 6 * 3 * 512 * 512
    parameter_bytes = jnp.dtype(config.model.param_dtype).itemsize
    assert work.exposed_received_bytes == 4 * elements * parameter_bytes * 3 / 4
    time = estimate_time(work, spec, 4, "bfloat16")
    assert time is not None
    assert time.links >= work.exposed_received_bytes / spec.ici_bytes_per_second
    dense = small_llama()
    dense.data.global_batch_size = 16
    assert estimate(dense.instantiate(), sizes, spec).work.exposed_received_bytes == 0


@pytest.mark.pairs
def test_error_distinguishes_host_from_device_memory():
    config = small_llama()
    state = tuner(config, "v5e-1", 10**6).cost_model.cost(())
    assert state is not None
    device_mib = int(0.5 * state.state) // MIB
    small_host = tuner(config, "v5e-1", device_mib, host_bytes=MIB)
    assert small_host.propose() is None
    assert " per host, which has 1.00 MiB" in small_host.describe_failure()
    assert "\n" not in small_host.describe_failure()
    tiny = tuner(config, "v5e-1", 1)
    assert tiny.propose() is None
    assert "no settings with the same result fit" in tiny.describe_failure()


# --- the compiler ----------------------------------------------------------------------------------------------------


@pytest.mark.pairs
def test_compiled_peak_refines_the_choice():
    config = small_llama()
    device_mib = 2 * needs(config, "v5e-1") // 3
    asked: list[Candidate] = []

    def compile_candidate(candidate: Candidate) -> int:
        asked.append(candidate)
        return int(1.1 * candidate.cost.peak)

    asking = tuner(config, "v5e-1", device_mib)
    best = confirm_fastest(asking, compile_candidate)
    assert best is not None
    assert 1 < len(asked) <= 5
    assert asking.budget.compiled[best.settings] <= 0.98 * device_mib * MIB


@pytest.mark.pairs
def test_settings_without_a_program_are_left_out():
    config = small_llama()
    refused: list[Candidate] = []

    def compile_candidate(candidate: Candidate) -> int:
        if not refused:
            refused.append(candidate)
            raise NoProgramError("no")
        return candidate.cost.peak

    best = confirm_fastest(tuner(config, "v5e-1", needs(config, "v5e-1")), compile_candidate)
    assert best is not None
    assert best.settings != refused[0].settings


# --- what is fixed and allowed ---------------------------------------------------------------------------------------


def test_explicit_command_line_and_auto_configs_are_kept():
    config = small_llama()
    config.memory.remat = "full"
    assert find_fixed_paths(config, ["memory.remat", "trainer.max_steps"]) == {"memory.remat"}
    assert find_fixed_paths(config, ()) == frozenset()
    config.memory.auto = True
    assert find_fixed_paths(config, ["memory.auto"]) == frozenset()
    assert find_fixed_paths(config, ()) == {"memory.remat"}
    config.mesh.data = 2
    assert {"mesh.data", "mesh.model"} < find_fixed_paths(config, ())


@pytest.mark.pairs
def test_fixed_fields_stay():
    config = small_llama()
    config.memory.remat = "full"
    candidate = tuner(config, "v5e-1", needs(config, "v5e-1") // 2, fixed=frozenset({"memory.remat"})).propose()
    assert candidate is not None
    assert get_text(candidate.settings, "memory.remat") is None


def test_allowed_changes_match_their_names():
    config = small_llama()
    h100 = targets.resolve("h100").spec
    assert list_variants(list_changes(config, (), (), h100)) == [()]
    changes = list_changes(config, parse_allowed("moments,rounding,optimizer8bit"), (), h100)
    variants = list_variants(changes)
    assert len(variants) == 6
    with_8bit = with_settings(config, variants[3])
    assert with_8bit.learner.optimizer.learning_rate == config.learner.optimizer.learning_rate
    assert with_8bit.learner.optimizer.weight_decay == 0.1
    with_8bit.instantiate()
    assert list_changes(config, ("moments",), ("learner.moment_dtype",), h100) == {}
    with pytest.raises(ConfigError, match="did you mean 'moments'"):
        parse_allowed("moment")


def test_8_bit_products_are_allowed_where_they_are_faster():
    config = small_llama()
    names = parse_allowed("fp8,int8,moments")
    by_target = {}
    for name in ("h100", "a100-80", "v5e-1", "tpu7x-8", "cpu:2"):
        by_target[name] = set(list_changes(config, names, (), targets.resolve(name).spec))
    assert by_target == {
        "h100": {"moments", "fp8", "int8"},
        "a100-80": {"moments", "int8"},
        "v5e-1": {"moments", "int8"},
        "tpu7x-8": {"moments", "fp8"},
        "cpu:2": {"moments"},
    }
    changes = list_changes(config, names, (), targets.resolve("h100").spec)
    # No product has two formats.
    assert len(list_variants(changes)) == 6
    changed = with_settings(config, changes["fp8"])
    stack = changed.model.instantiate().stages["stack"]
    recipes = [layer.recipe for layer in stack.pattern.walk() if isinstance(layer, Linear)]
    assert recipes == [RECIPES["fp8_tensor"]] * 7
    # The user's own rules stay.
    assert list_changes(changed, ("int8",), (), targets.resolve("h100").spec) == {}


@pytest.mark.pairs
def test_8_bit_products_are_chosen_if_allowed():
    config = small_llama(2)
    config.model.dim = 4096
    seconds = {}
    for allowed in ((), ("fp8",)):
        best = Tuner(config, targets.resolve("h100"), device_bytes=None, allowed=allowed).propose()
        assert best is not None
        seconds[allowed] = best.cost.seconds
        text = get_text(best.settings, "model.precision")
        assert (text is not None and "fp8_tensor" in text) == bool(allowed)
    assert seconds["fp8",] < 0.9 * seconds[()]
    impossible = Tuner(config, targets.resolve("a100-80"), device_bytes=None, allowed=("fp8",))
    best = impossible.propose()
    assert best is not None
    assert any("--allow=fp8: not possible" in note for note in impossible.build_choice(best).notes)


# --- the largest batch -----------------------------------------------------------------------------------------------


def test_the_largest_microbatch_fits_and_the_next_does_not():
    config = small_llama()
    config.data.global_batch_size = 8
    asking = tuner(config, "v5e-1", 2 * needs(config, "v5e-1") // 3, fixed=BATCH_MODE_FIXED)
    candidate = asking.propose()
    assert candidate is not None
    ((path, count),) = candidate.settings
    assert path == "learner.accumulate"
    fewer = (setting("learner.accumulate", int(count) // 2),)
    assert not asking.budget.fits(fewer, asking.cost_model.cost(fewer))
    microbatch, whole = describe_largest_batch(asking, candidate)
    assert f"{8 // int(count)} rows per device" in microbatch
    assert "data.global_batch_size=" in whole


def test_a_search_returns_its_traces_to_the_garbage_collector():
    config = small_llama()
    machine = Machine("v5e-1", 1, 1024 * MIB, None)
    frozen = gc.get_freeze_count()
    result = autotune(TuningRequest(config, machine, "memory", [], (), True), targets.resolve("v5e-1"), fresh=True)
    assert result.choice is not None
    assert gc.get_freeze_count() <= frozen


# --- output ----------------------------------------------------------------------------------------------------------


def test_a_choice_goes_through_json():
    config = small_llama()
    asking = tuner(config, "v5e-1", 2 * needs(config, "v5e-1") // 3)
    candidate = asking.propose()
    assert candidate is not None
    choice = asking.build_choice(candidate, ["a note"])
    assert TunedSettings.from_json(json.loads(json.dumps(choice.to_json()))) == choice
    assert choice.neighbors
    assert all(neighbor.reason for neighbor in choice.neighbors)


def test_a_flag_is_quoted_for_a_shell():
    settings = (setting("memory.remat", "save:query;offload:input"), setting("learner.accumulate", 4))
    assert flags(settings) == "'--config.memory.remat=save:query;offload:input' --config.learner.accumulate=4"


def test_the_help_lists_the_changes_that_may_be_allowed(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert f"allowed changes to the training: {', '.join(ALLOWED)} --host_memory_gib" in words


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--auto=foo"], "invalid choice: 'foo'"),
        (
            ["--auto", "--allow=momentum"],
            "--allow=momentum: 'momentum' is not one of rounding, moments, optimizer8bit, fp8, int8",
        ),
        (["--allow=moments"], "--allow requires --auto"),
        (["--host_memory_gib=0"], "--host_memory_gib=0: expected more than 0"),
        (["--auto", "--host_memory_gib=0"], "--host_memory_gib=0: expected more than 0"),
        (
            ["--auto", "--compare=memory.remat=none,full"],
            "--auto takes one target, and cannot be combined with --compare",
        ),
    ],
)
def test_a_bad_flag_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture):
    assert plan.main(["--config=gpt2-124m", "--target=cpu:1", *argv]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.pairs
def test_verb_prints_overrides_and_reuses_the_stored_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    argv = ["--config=stdlib-tiny", "--target=cpu:1", "--auto", "--step_only", "--device_memory_gib=0.08"]
    argv += ["--config.data.global_batch_size=8", f"--json={tmp_path / 'plan.json'}"]
    assert plan.main(argv) == 0
    first = capsys.readouterr().out
    assert first.startswith("--config.")
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["fits"]
    assert report["auto"]["compiled"]
    assert report["device_allocated_bytes"] == report["auto"]["peak"]
    monkeypatch.setattr("plimsoll.extras.autotune.autotune.Tuner", lambda *_, **__: pytest.fail("searched again"))
    monkeypatch.setattr(
        "plimsoll.framework.plan.build_report.compile_report", lambda *_, **__: pytest.fail("compiled again")
    )
    assert plan.main(argv) == 0
    assert capsys.readouterr().out == first


def test_impossible_fit_is_one_line(capsys: pytest.CaptureFixture):
    argv = ["--config=gpt2-124m", "--target=cpu:1", "--auto", "--estimate", "--device_memory_gib=0.01"]
    assert plan.main(argv) == ExitCode.TOO_BIG
    out = capsys.readouterr().out
    assert out.startswith("no settings with the same result fit")
    assert out.count("\n") == 1


@pytest.mark.pairs
def test_overlapped_transfers_cost_nothing():
    """Time is not linear in the number of offloaded layers: transfers that matrix products hide cost nothing."""
    config = configs.load("llama3-8b")
    config.data.global_batch_size = 8
    target = targets.resolve("h100")
    tuner = Tuner(config, target, device_bytes=target.limit_bytes, host_bytes=128 << 30)
    best = tuner.propose()
    assert best is not None
    values = {"learner.accumulate": "8", "memory.update": "layer_programs", "memory.optimizer_state": "pinned_host"}
    values["memory.gradients"] = "pinned_host:24"
    rival = select_changes(config, [setting(path, value) for path, value in values.items()])
    cost = tuner.cost_model.cost(rival)
    assert cost is not None
    assert tuner.budget.fits(rival, cost)
    assert best.cost.seconds <= 1.01 * cost.seconds
