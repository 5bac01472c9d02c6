"""Config fields that count training steps, schedules with scaled steps, and schedules that follow the run's length."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from plimsoll import configs
from plimsoll.configs.parts import adamw
from plimsoll.framework.config import Config, ConfigError, config_for
from plimsoll.framework.optimizers.learning_rates import warmup_cosine, warmup_linear, warmup_stable_decay
from plimsoll.framework.optimizers.schedule_steps import (
    STEP_ARGUMENTS,
    RunSteps,
    TrainingSteps,
    following,
    get_schedule_length,
    scale,
    schedules,
    with_run_length,
)
from plimsoll.framework.program.options import TrainerOptions
from plimsoll.framework.program.run_length import rate_course, rate_notes, report_length_change, set_length

# One schedule of each kind, written for 1000 steps, and its length.
OF_OPTAX: dict[str, tuple[Config, int | None]] = {
    "constant": (config_for(optax.constant_schedule, value=0.1), None),
    "cosine": (config_for(optax.cosine_decay_schedule, init_value=0.1, decay_steps=1000), 1000),
    "cosine onecycle": (config_for(optax.cosine_onecycle_schedule, transition_steps=1000, peak_value=0.1), 1000),
    "exponential": (
        config_for(
            optax.exponential_decay, init_value=0.1, transition_steps=500, decay_rate=0.1, transition_begin=100
        ),
        500,
    ),
    "joined": (
        config_for(
            optax.join_schedules,
            schedules=[
                config_for(optax.linear_schedule, init_value=0.0, end_value=0.1, transition_steps=100),
                config_for(optax.constant_schedule, value=0.1),
                config_for(optax.cosine_decay_schedule, init_value=0.1, decay_steps=200),
            ],
            boundaries=[100, 800],
        ),
        800,
    ),
    "linear onecycle": (config_for(optax.linear_onecycle_schedule, transition_steps=1000, peak_value=0.1), 1000),
    "linear": (
        config_for(
            optax.linear_schedule, init_value=0.1, end_value=0.01, transition_steps=900, transition_begin=100
        ),
        900,
    ),
    "polynomial": (
        config_for(
            optax.polynomial_schedule,
            init_value=0.1,
            end_value=0.01,
            power=2.0,
            transition_steps=900,
            transition_begin=100,
        ),
        900,
    ),
    "piecewise": (
        config_for(
            optax.piecewise_constant_schedule, init_value=0.1, boundaries_and_scales={"500": 0.5, "800": 0.1}
        ),
        800,
    ),
    "interpolated": (
        config_for(
            optax.piecewise_interpolate_schedule,
            interpolate_type="linear",
            init_value=0.1,
            boundaries_and_scales={"500": 0.5, "800": 0.1},
        ),
        800,
    ),
    "sgdr": (
        config_for(
            optax.sgdr_schedule,
            cosine_kwargs=[
                {"init_value": 0.0, "peak_value": 0.1, "warmup_steps": 100, "decay_steps": 400, "end_value": 0.01},
                {"init_value": 0.01, "peak_value": 0.05, "warmup_steps": 0, "decay_steps": 600, "end_value": 0.0},
            ],
        ),
        1000,
    ),
    "warmup constant": (
        config_for(optax.warmup_constant_schedule, init_value=0.0, peak_value=0.1, warmup_steps=100),
        100,
    ),
    "warmup cosine": (
        config_for(
            optax.warmup_cosine_decay_schedule, init_value=0.0, peak_value=0.1, warmup_steps=100, decay_steps=1000
        ),
        1000,
    ),
    "warmup exponential": (
        config_for(
            optax.warmup_exponential_decay_schedule,
            init_value=0.0,
            peak_value=0.1,
            warmup_steps=100,
            transition_steps=300,
            decay_rate=0.5,
            transition_begin=50,
        ),
        300,
    ),
}  # fmt: skip
OURS = [warmup_cosine, warmup_linear, warmup_stable_decay]


def rates(schedule: Config, steps: Any) -> np.ndarray:
    function = schedule.instantiate()
    return np.array([float(function(jnp.int32(step))) for step in steps])


def test_every_optax_schedule_is_known():
    functions = {
        function
        for _, function in inspect.getmembers(optax, inspect.isfunction)
        if inspect.signature(function).return_annotation == optax.Schedule
    }
    assert len(functions) >= 14
    assert functions <= set(STEP_ARGUMENTS)
    for function, arguments in STEP_ARGUMENTS.items():
        assert set(arguments) <= set(inspect.signature(function).parameters)


def test_every_schedule_type_is_tested():
    tried = {schedule._target for schedule, _ in OF_OPTAX.values()}
    assert tried == {target for target in STEP_ARGUMENTS if "schedule_free" not in target.__name__}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", OF_OPTAX)
def test_a_scaled_schedule_is_the_same_curve(name: str):
    """With a tenth of the steps, the rates are those of every tenth step; the test compares every third of them."""
    schedule, length = OF_OPTAX[name]
    config = config_for(optax.adamw, learning_rate=schedule)
    assert get_schedule_length(config.learning_rate) == length
    assert scale(config, 100, 1000) == []
    assert get_schedule_length(config.learning_rate) == (None if length is None else length // 10)
    compared = range(0, 1000, 30)  # without 500 and 800, where segments meet
    expected = rates(schedule, compared)
    found = rates(config.learning_rate, [step // 10 for step in compared])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-8)


def test_only_training_steps_are_scaled():
    """Muon's iterations and projection intervals do not count steps of the run, even if their names say steps."""
    muon = config_for(optax.contrib.muon, learning_rate=OF_OPTAX["warmup cosine"][0], ns_steps=5)
    galore = config_for(optax.contrib.galore, learning_rate=0.1, update_proj_gap=200)
    free = config_for(optax.contrib.schedule_free_adamw, warmup_steps=100)
    for config in (muon, galore, free):
        assert scale(config, 100, 1000) == []
    assert (muon.ns_steps, muon.learning_rate.warmup_steps, muon.learning_rate.decay_steps) == (5, 10, 100)
    assert galore.update_proj_gap == 200
    assert free.warmup_steps == 10


def schedule_without_hints(*, peak: float, hold_steps: int) -> optax.Schedule:
    return optax.warmup_constant_schedule(0.0, peak, hold_steps)


def schedule_with_hints(
    *, peak: float, hold: TrainingSteps, repeat_steps: int = 7, total: RunSteps | None = None
) -> optax.Schedule:
    assert total is not None
    assert repeat_steps == 7
    return optax.warmup_constant_schedule(0.0, peak * total, hold)


def schedule_with_step_hint(*, hold: TrainingSteps, repeat_steps: int = 7) -> optax.Schedule:
    assert repeat_steps == 7
    return optax.warmup_constant_schedule(0.0, 1.0, hold)


def test_user_schedule_declares_what_counts_steps():
    config = config_for(optax.adamw, learning_rate=config_for(schedule_without_hints, peak=0.1, hold_steps=500))
    (line,) = scale(config, 100, 1000)
    assert line.startswith("learning_rate (tests.optimizers.test_schedule_steps.schedule_without_hints) is unchanged")
    assert config.learning_rate.hold_steps == 500
    config = config_for(optax.adamw, learning_rate=config_for(schedule_with_step_hint, hold=500))
    assert scale(config, 100, 1000) == []
    assert (config.learning_rate.hold, config.learning_rate.repeat_steps) == (50, 7)
    config = config_for(optax.adamw, learning_rate=config_for(schedule_with_hints, peak=0.1, hold=5))
    assert following(config) == ["learning_rate.total"]
    assert with_run_length(config, 30).learning_rate.total == 30
    assert config.learning_rate.total is None


def test_steps_as_keys_are_numbers_where_they_are_used():
    """JSON keys are strings, but a schedule compares them to a count."""
    config = config_for(optax.piecewise_constant_schedule, init_value=1.0, boundaries_and_scales={5: 0.5, "8": 0.1})
    assert config.boundaries_and_scales == {"5": 0.5, "8": 0.1}
    assert Config.from_json(config.to_json()) == config
    assert list(rates(config, [4, 6, 9])) == pytest.approx([1.0, 0.5, 0.05])
    with pytest.raises(ConfigError, match=r"boundaries_and_scales: expected a dict with integer keys"):
        config.boundaries_and_scales = {"five": 0.5}


# --- schedules that follow the run -----------------------------------------------------------------------------------


def test_named_configs_have_the_rates_that_their_sources_say():
    """Compare each schedule bit for bit at the config's own length: (peak, warm-up, final fraction of the peak)."""
    expected = {
        "stdlib-tiny": [(0.02, 90, 0.0), (0.3, 90, 0.0), (0.02, 90, 0.0)],
        "nanogpt-cpu": [(1e-3, 100, 0.1)],
        "gpt2-124m": [(6e-4, 2000, 0.1)],
        "llama3-8b": [(3e-4, 8000, 0.1)],
        "qwen2.5-7b": [(3e-4, 2000, 0.1)],
        "digits-glow": [(1e-3, 100, 0.02)],
        "images-glow": [(1e-3, 5000, 0.02)],
        "lora-tiny": [(1e-2, 30, 0.1)],
    }
    for name, written in expected.items():
        config = configs.load(name)
        steps = config.trainer.max_steps
        found = [schedule for _, schedule in schedules(with_run_length(config.learner, steps))]
        assert len(found) == len(written)
        for schedule, (peak, warmup, end) in zip(found, written, strict=True):
            reference = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, end_value=end * peak)
            places = [0, 1, warmup - 1, warmup, warmup + 1, steps // 2, steps - 1, steps, steps + 5]
            assert (
                np.array([reference(place) for place in places], np.float64).tolist()
                == rates(schedule, places).tolist()
            )


def test_shapes_against_their_formulas():
    steps, warmup, peak = 200, 20, 0.5
    at = np.arange(steps)
    rise = peak * at / warmup
    line = config_for(warmup_linear, peak_value=peak, warmup=0.1, end_fraction=0.2, steps=steps)
    fall = peak * (1 - 0.8 * (at - warmup) / (steps - warmup))
    np.testing.assert_allclose(rates(line, at), np.where(at < warmup, rise, fall), rtol=1e-5)
    stable = config_for(warmup_stable_decay, peak_value=peak, warmup=warmup, decay=0.25, steps=steps)
    fall = peak * (1 - (at - 150) / 50)
    wanted = np.where(at < warmup, rise, np.where(at < 150, peak, fall))
    np.testing.assert_allclose(rates(stable, at), wanted, rtol=1e-5, atol=1e-7)
    stable.decay = 0
    np.testing.assert_allclose(rates(stable, at), np.where(at < warmup, rise, peak), rtol=1e-5)
    curve = config_for(warmup_cosine, peak_value=peak, warmup=warmup, end_fraction=0.1, steps=steps)
    fall = peak * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (at - warmup) / (steps - warmup))))
    np.testing.assert_allclose(rates(curve, at), np.where(at < warmup, rise, fall), rtol=1e-5)


@pytest.mark.pairs
@pytest.mark.parametrize("target", OURS)
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 19, 20, 21])
@pytest.mark.parametrize("warmup", [0, 20, 0.0, 0.5, 0.99])
def test_any_run_length_has_finite_rates(target: Any, steps: int, warmup: float):
    schedule = config_for(target, peak_value=1.0, warmup=warmup, steps=steps)
    found = rates(schedule, range(steps + 2))
    assert np.isfinite(found).all()
    assert found.min() >= 0
    assert found.max() <= 1.0


@pytest.mark.parametrize("target", OURS)
def test_contradictory_schedules_are_refused(target: Any):
    schedule = config_for(target, peak_value=1.0)
    with pytest.raises(ConfigError, match=r"steps: expected the run's length, which an experiment fills in"):
        schedule.instantiate()
    for field, value in (("warmup", 1.0), ("warmup", -1), ("warmup", True), ("peak_value", -1.0), ("steps", 0)):
        with pytest.raises(ConfigError, match=rf"{field}: expected"):
            schedule[field] = value


def test_an_experiment_fills_in_its_length():
    config = configs.load("nanogpt-cpu")
    for steps in (20, 300):
        config.trainer.max_steps = steps
        rate = config.instantiate().learner.learning_rates["default"]
        assert [float(rate(step)) for step in (0, steps // 20, steps)] == pytest.approx([0.0, 1e-3, 1e-4])
    config.learner.optimizer.learning_rate.steps = 2000
    assert float(config.instantiate().learner.learning_rates["default"](100)) == pytest.approx(1e-3)
    assert config.to_dict()["learner"]["optimizer"]["learning_rate"]["steps"] == 2000


# --- whichever comes first -------------------------------------------------------------------------------------------


class Run:
    """The fields that `set_length` reads."""

    def __init__(self, *, learner: Config, trainer: Config):
        self.parts = learner, trainer


def run(rate: Config, **trainer: Any) -> Config:
    return config_for(
        Run, learner=config_for(optax.adamw, learning_rate=rate), trainer=config_for(TrainerOptions, **trainer)
    )


def test_setting_epochs_scales_the_other_steps():
    config = run(OF_OPTAX["warmup cosine"][0], max_steps=1000, max_epochs=1.5)
    lines = set_length(config, 45)
    assert lines == [
        "trainer.max_epochs = 1.5: learner.learning_rate.warmup_steps 100 -> 4",
        "trainer.max_epochs = 1.5: learner.learning_rate.decay_steps 1000 -> 45",
        "trainer.max_epochs = 1.5: trainer.max_steps 1000 -> 45",
    ]
    assert rate_notes(config.learner, 45) == []


def test_explicit_steps_set_the_length():
    config = run(config_for(warmup_cosine, peak_value=0.1), max_steps=15, max_epochs=3)
    (line,) = set_length(config, 43)
    assert line == "trainer.max_epochs = 3 would be 43 steps: trainer.max_steps = 15 ends the run earlier"
    assert config.trainer.max_steps == 15
    assert rate_notes(config.learner, 15) == []


def test_epochs_set_the_length():
    config = run(config_for(warmup_cosine, peak_value=0.1, warmup=5), max_epochs=3)
    assert set_length(config, 43) == ["trainer.max_epochs = 3: trainer.max_steps none -> 43"]
    assert config.learner.learning_rate.warmup == 5
    assert set_length(config, 43) == []


@pytest.mark.parametrize(
    ("rate", "course"),
    [
        (config_for(warmup_cosine, peak_value=0.1, warmup=20), "0 -> 0.1 (step 21) -> 0.01"),
        (config_for(optax.linear_schedule, init_value=0.1, end_value=0.0, transition_steps=100), "0.1 -> 0"),
        (config_for(optax.linear_schedule, init_value=0.0, end_value=0.1, transition_steps=9), "0 -> 0.1"),
        (0.25, "0.25"),
    ],
)
def test_learning_rate_course_is_read_from_the_schedule(rate: Any, course: str):
    if isinstance(rate, Config):
        rate = with_run_length(rate, 300).instantiate()
    else:
        rate = optax.constant_schedule(rate)
    assert rate_course(rate, 300) == course


def test_resuming_with_another_length_reports_the_rates():
    config = run(config_for(warmup_cosine, peak_value=0.1), max_steps=300)
    stored = {"trainer": {"max_steps": 150}}
    wanted = "none, so the rates now follow a run of 300 steps; set it to 150 to keep the previous rates"
    assert report_length_change(stored, config) == [f"learner.learning_rate.steps: {wanted}"]
    assert report_length_change({"trainer": {"max_steps": 300}}, config) == []
    config.learner.learning_rate.steps = 150
    assert report_length_change(stored, config) == []


def test_a_run_has_an_end():
    with pytest.raises(ConfigError, match="expected max_steps, max_epochs, or both"):
        config_for(TrainerOptions).instantiate()


# --- notes to the user -----------------------------------------------------------------------------------------------


def test_unreached_peak_is_reported():
    (line,) = rate_notes(config_for(Learning, optimizer=adamw(peak=0.1, warmup=50)), 15)
    assert line == (
        "learner.optimizer.learning_rate: the rate reaches only 0.028 in 15 steps, not its peak of 0.1; "
        "set learner.optimizer.learning_rate.warmup below 15, or to a fraction of the run (for example 0.05)"
    )
    (line,) = rate_notes(config_for(Learning, optimizer=adamw(peak=0.1, warmup=0.5, steps=1000)), 100)
    assert line.endswith("(for example 0.05), and learner.optimizer.learning_rate.steps=none")
    optimizer = config_for(optax.adamw, learning_rate=OF_OPTAX["warmup cosine"][0])
    (line,) = rate_notes(config_for(Learning, optimizer=optimizer), 50)
    assert "not its peak of 0.1; set learner.optimizer.learning_rate.warmup_steps and " in line
    assert rate_notes(config_for(Learning, optimizer=optimizer), 500) == []  # stops after its peak, to resume later


def test_rate_ending_before_the_run_is_reported():
    optimizer = config_for(optax.adamw, learning_rate=OF_OPTAX["warmup cosine"][0])
    (line,) = rate_notes(config_for(Learning, optimizer=optimizer), 3000)
    assert "learning_rate: the rate is 0 after about 998 of 3000 steps; set" in line
    assert rate_notes(config_for(Learning, optimizer=optimizer), 1000) == []


@pytest.mark.parametrize(("end", "shown"), [(-1.0, "-"), (float("nan"), "nan")])
def test_invalid_rates_are_refused(end: float, shown: str):
    rate = config_for(optax.linear_schedule, init_value=0.1, end_value=end, transition_steps=10)
    with pytest.raises(
        ConfigError, match=rf"^learner\.optimizer\.learning_rate: expected finite rates >= 0, given {shown}"
    ):
        rate_notes(config_for(Learning, optimizer=config_for(optax.adamw, learning_rate=rate)), 20)


class Learning:
    """A stand-in for a learner's config, for functions that read its schedules."""

    def __init__(self, *, optimizer: Config):
        self.optimizer = optimizer
