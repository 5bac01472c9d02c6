"""Plans of any JAX function: bytes come from the compiler, names from the user, and errors are one line."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import plimsoll as pl
from plimsoll.framework.plan.function_call import FunctionCall
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import plan

SHAPE = jax.ShapeDtypeStruct
OPTIMIZER = optax.adam(1e-3)


def loss(params: Any, batch: Any) -> jax.Array:
    with jax.named_scope("hidden"):
        hidden = jax.nn.gelu(batch @ params["up"])
    with jax.named_scope("out"):
        return jnp.mean(jnp.square(hidden @ params["down"]))


def train_step(params: Any, moments: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(params, batch)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return optax.apply_updates(params, updates), moments, value


def arguments(width: int = 64, rows: int = 512) -> tuple[Any, Any, Any]:
    params = {"up": SHAPE((width, 4 * width), jnp.float32), "down": SHAPE((4 * width, width), jnp.float32)}
    return params, jax.eval_shape(OPTIMIZER.init, params), SHAPE((rows, width), jnp.float32)


@pytest.mark.pairs
@pytest.mark.parametrize("donate", [(), (0, 1), ("params", "moments")])
def test_bytes_match_the_compiler(donate: tuple[Any, ...]):
    planned = pl.plan_function(train_step, arguments(), "cpu:1", donate=donate)
    positions = (0, 1) if donate else ()
    stats = jax.jit(train_step, donate_argnums=positions).lower(*arguments()).compile().memory_analysis()
    assert stats is not None
    new_bytes = stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert planned.peak_bytes == stats.argument_size_in_bytes + new_bytes + stats.temp_size_in_bytes
    assert sum(planned.report["breakdown"].values()) == planned.report["device_peak_bytes"]
    groups = planned.report["breakdown"]
    params_bytes = 2 * 64 * 256 * 4
    assert groups["params"] == params_bytes
    assert groups["moments"] == 2 * params_bytes + 4
    assert groups["batch"] == 512 * 64 * 4
    assert list(groups)[:3] == ["params", "moments", "batch"]
    # Without donation, the results are a second copy.
    assert groups["results"] < 4096 if donate else groups["results"] > 3 * params_bytes
    # By hand: 5 products of 2 * rows * in * out each, 2 with the first matrix (no input gradient), 3 with the second.
    assert planned.report["flops_per_step"] == 2 * 512 * 64 * 256 * 5


def test_names_come_from_the_user():
    planned = pl.plan_function(train_step, arguments(), "cpu:1", donate=(0, 1))
    names = {buffer["name"] for buffer in planned.report["largest"]}
    assert {"params['up']", "moments[0].mu['down']", "batch"} <= names
    assert any(name.startswith("hidden/") for name in names)
    text = str(planned)
    assert "at the peak of train_step" in text
    assert "FLOPs per call" in text
    assert "moments[0].mu" in planned._repr_html_()


@pytest.mark.pairs
def test_a_jitted_function_and_real_arrays_are_the_same():
    concrete = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), arguments())
    planned = pl.plan_function(jax.jit(train_step), concrete, "cpu:1")
    assert planned.peak_bytes == pl.plan_function(train_step, arguments(), "cpu:1").peak_bytes


def test_jitted_function_keeps_its_jit_options():
    @functools.partial(jax.jit, static_argnums=2, donate_argnames="weights")
    def scale(weights: jax.Array, rows: jax.Array, activation: str) -> jax.Array:
        return weights * getattr(jax.nn, activation)(rows)

    square = SHAPE((512, 512), jnp.float32)
    planned = pl.plan_function(scale, (square, square, "relu"), "cpu:1")
    assert planned.report["device_alias_bytes"] == 512 * 512 * 4
    assert planned.report["breakdown"]["weights"] == 512 * 512 * 4
    # A partial has no name of its own.
    partial = functools.partial(jnp.multiply, 2.0)
    assert pl.plan_function(partial, (square,), "cpu:1").report["config"] == "multiply"


def test_one_donated_argument_is_itself():
    for donate in ("params", 0):
        planned = pl.plan_function(train_step, arguments(), "cpu:1", donate=donate)
        assert planned.report["device_alias_bytes"] == 2 * 64 * 256 * 4


@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_mesh_that_the_function_closes_over_is_taken_as_it_is(is_jitted: bool):
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    # A mesh as user code makes it, with its own order of devices.
    devices = topologies.get_topology_desc("v5e:2x4", "tpu", num_slices=1, wrap=(False,) * 3).devices
    mesh = Mesh(np.array(devices[::-1]).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    whole = NamedSharding(mesh, P())
    by_rows = NamedSharding(mesh, P("data"))

    def product(weights: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(rows @ weights, by_rows)

    function = product
    options: dict[str, Any] = {"shardings": (None, by_rows), "out_shardings": None}
    if is_jitted:
        function = jax.jit(product, in_shardings=(whole, by_rows))
        options = {}
    matrix = SHAPE((1024, 1024), jnp.float32)
    planned = pl.plan_function(function, (matrix, matrix), "v5e-8", mesh=mesh, **options)
    assert planned.report["mesh"] == {"data": 2, "model": 4}
    assert planned.report["device_argument_bytes"] == 2**22 + 2**21
    assert planned.report["device_output_bytes"] == 2**21


def test_abstract_mesh_contributes_only_its_axes():
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    matrix = SHAPE((64, 64), jnp.float32)

    def total(rows: jax.Array, others: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Explicit axes are part of the type.
        assert jax.typeof(rows).sharding.spec == P("data", None)
        return rows + 1, others + 1

    options: dict[str, Any] = {"shardings": (P("data"), P("model")), "out_shardings": (P("data"), None)}
    planned = pl.plan_function(total, (matrix, matrix), "cpu:8", mesh=mesh, **options)
    assert planned.report["device_output_bytes"] == 64 * 64 * 4 // 2 + 64 * 64 * 4 // 4 + 16


def test_compiler_options_are_passed_on():
    options = {"xla_cpu_no_such_option": True}
    with pytest.raises(Exception, match="xla_cpu_no_such_option"):
        pl.plan_function(train_step, arguments(), "cpu:1", compiler_options=options)


@pytest.mark.parametrize("by_leaves", [True, False])
def test_shardings_use_the_targets_devices(by_leaves: bool):
    mesh = {"data": 2, "model": 4}
    specs: tuple[Any, ...] = ({"up": P(None, "model"), "down": P("model")}, P("data"))
    params, _, batch = arguments()
    given: tuple[Any, ...] = (params, batch)
    shardings: Any = specs
    if by_leaves:
        # These shapes were made for another mesh with the same axes.
        elsewhere = AbstractMesh((2, 4), ("data", "model"))
        placed = {
            name: SHAPE(one.shape, one.dtype, sharding=NamedSharding(elsewhere, specs[0][name]))
            for name, one in params.items()
        }
        given = (placed, SHAPE(batch.shape, batch.dtype, sharding=NamedSharding(elsewhere, P("data"))))
        shardings = None
    planned = pl.plan_function(jax.grad(loss), given, "cpu:8", mesh=mesh, shardings=shardings)
    groups = planned.report["breakdown"]
    assert groups["params"] == 2 * 64 * 256 * 4 // 4
    assert groups["batch"] == 512 * 64 * 4 // 2
    assert planned.report["collective_bytes"]["all-reduce"] > 0


def test_offloaded_bytes_count_on_the_host():
    pytest.importorskip("libtpu", reason="libtpu is not installed: make plan-tpu")
    matrix = SHAPE((256, 256), jnp.float32)
    kept_on_host = NamedSharding(AbstractMesh((1,), ("devices",)), P(), memory_kind="pinned_host")

    def fetch(weight: jax.Array, rows: jax.Array) -> jax.Array:
        return rows @ jax.device_put(weight, jax.memory.Space.Device)

    offloaded = SHAPE(matrix.shape, matrix.dtype, sharding=kept_on_host)
    planned = pl.plan_function(fetch, (offloaded, matrix), "v5e-1")
    assert planned.report["host_peak_bytes"] == 256 * 256 * 4


def test_leaves_that_are_no_arrays_stay_as_they_are():
    def apply(layer: dict[str, Any], rows: jax.Array) -> dict[str, Any]:
        return {"rows": layer["activation"](rows @ layer["weight"]), "activation": layer["activation"]}

    layer = {"activation": jax.nn.relu, "weight": SHAPE((32, 32), jnp.float32), "name": "first"}
    planned = pl.plan_function(apply, (layer, SHAPE((8, 32), jnp.float32)), "cpu:1")
    assert planned.report["breakdown"]["layer"] == 32 * 32 * 4


def test_a_limit_is_the_verdict():
    assert pl.plan_function(train_step, arguments(), "cpu:1").fits
    assert not pl.plan_function(train_step, arguments(), "cpu:1", device_memory_gib=1e-5).fits


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"donate": ("weights",)}, "no argument 'weights'; its arguments: params, batch"),
        ({"donate": (2,)}, "called with 2 arguments, given 2"),
        ({"mesh": {"data": 3}}, "mesh: data=3 does not match the 1 devices of cpu-1"),
        ({"shardings": (P(),)}, r"shardings: expected one per argument \(2\), given 1"),
        ({"shardings": (P("rows"), P())}, "a sharding uses rows, but the axes of the mesh are devices"),
        ({"shardings": ({"upp": P()}, P())}, "not a prefix of argument 0"),
        ({"device_memory_gib": 0.0}, "expected more than 0"),
        ({"target": "h101"}, "unknown target 'h101'; nearest: h100"),
    ],
)
def test_user_errors(options: dict[str, Any], said: str):
    params, _, batch = arguments()
    with pytest.raises(ValueError, match=said):
        pl.plan_function(loss, (params, batch), **{"target": "cpu:1", **options})


def test_tracing_error_names_the_line():
    params, _, _ = arguments()
    with pytest.raises(ValueError, match=r"loss cannot be traced: TypeError: dot_general .*test_function.py:\d+\]"):
        pl.plan_function(loss, (params, SHAPE((8, 63), jnp.float32)), "cpu:1")
    with pytest.raises(TypeError, match="expected a function, given int"):
        FunctionCall(3, ())  # pyright: ignore[reportArgumentType]


STEP = """
import jax

def double(weights):
    return weights * 2

def step():
    return double, (jax.ShapeDtypeStruct((1024, 1024), "float32"),)

def donating():
    return *step(), {"donate": ("weights",), "name": "doubling"}

def wrong():
    return 3

def raising():
    raise KeyError("nothing")
"""


@pytest.fixture
def step_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(STEP)
    return tmp_path


def test_the_verb_plans_a_function(step_file: Path, capsys: pytest.CaptureFixture):
    assert plan.main(["--function=step.py:step", "--target=cpu:1", "--json=plan.json", "--html=plan.html"]) == 0
    assert "fits: 8.00 MiB" in capsys.readouterr().out
    assert json.loads((step_file / "plan.json").read_text())["breakdown"] == {"weights": 2**22, "results": 2**22}
    assert "weights" in (step_file / "plan.html").read_text()
    assert plan.main(["--function=step.py:donating", "--target=cpu:1", "--device_memory_gib=0.003"]) == ExitCode.TOO_BIG
    assert "DOES NOT FIT: needs 4.00 MiB of the 3.07 MiB per device" in capsys.readouterr().out


def test_the_verb_plans_a_function_for_several_targets(step_file: Path, capsys: pytest.CaptureFixture):
    assert plan.main(["--function=step.py:step", "--target=cpu:1,cpu:2"]) == 0
    assert capsys.readouterr().out.count("8.00 MiB") == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--function=step.py:stepp"], "did you mean 'step'?"),
        (["--function=step.py"], "expected FILE.py:NAME"),
        (["--function=other.py:step"], "no config file"),
        (
            ["--function=step.py:double"],
            "double takes weights; expected the name of a function without required arguments",
        ),
        (["--function=step.py:wrong"], "wrong() returned int; expected (function, arguments)"),
        (["--function=step.py:step", "--config=gpt2-124m"], "--function cannot be combined with --config"),
        (["--function=step.py:step", "--data=rows.jsonl"], "--function cannot be combined with --data"),
        (["--function=step.py:step", "--compiled", "--markdown=x"], "combined with --compiled, --markdown"),
        (
            ["--function=step.py:step", "--estimate", "--smallest"],
            "--function cannot be combined with --smallest, --estimate",
        ),
        (["--function=step.py:step", "--json=no/plan.json"], "--json=no/plan.json: the folder no does not exist"),
    ],
)
def test_command_line_errors(step_file: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture):
    assert plan.main([*flags, "--target=cpu:1"]) == ExitCode.USAGE
    assert said in capsys.readouterr().err.splitlines()[-1]
