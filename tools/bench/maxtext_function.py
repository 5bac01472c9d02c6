"""MaxText's own training step as a function for `plimsoll plan --function`; nothing of MaxText is copied or altered.

    MAXTEXT="compile_topology=v5e-16 model_name=llama2-7b per_device_batch_size=1 max_target_length=2048" \\
    plimsoll plan --function=tools/bench/maxtext_function.py:step --target=v5e-16

Needs an environment in which both MaxText and Plimsoll are installed. The variable holds fields of MaxText's config;
compile_topology is the target, and a field with spaces needs quotes. The helpers are those that MaxText's ahead-of-time
compilation calls, in the same order (maxtext.trainers.pre_train.train_compile, `main`). tools/bench/maxtext_bytes.py
compares the plan with MaxText's own figures.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

import jax

FIELDS = "compile_topology=v5e-16 model_name=llama2-7b per_device_batch_size=1 max_target_length=2048"
# Environment of the processes that compile MaxText.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # nothing runs
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
}
# The flag that `main` of train_compile sets before anything else.
_RANDOM_FLAG = "--xla_tpu_spmd_rng_bit_generator_unsafe=true"


def command() -> list[str]:
    """Return the arguments of MaxText's train_compile: the fields of the variable, one slice, and no files."""
    import maxtext  # pyright: ignore[reportMissingImports]

    base = Path(next(iter(maxtext.__path__))) / "configs" / "base.yml"
    folder = tempfile.gettempdir()
    silent = ["dataset_type=synthetic", f"base_output_directory={folder}", "run_name=plan", "jax_cache_dir="]
    return [
        "train_compile",
        str(base),
        *silent,
        "compile_topology_num_slices=1",
        *shlex.split(os.environ.get("MAXTEXT", FIELDS)),
    ]


def step() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return MaxText's step, its abstract arguments, and the options of `pl.plan_function`."""
    # Installed in MaxText's environment, but not necessarily in this one.
    from flax.linen import partitioning  # pyright: ignore[reportMissingImports]
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train import train, train_compile  # pyright: ignore[reportMissingImports]
    from maxtext.utils import max_utils, maxtext_utils, sharding  # pyright: ignore[reportMissingImports]

    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_RANDOM_FLAG}"
    config = pyconfig.initialize(command())
    mesh = train_compile.get_topology_mesh(config)
    arguments, _, state_shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
    params_shardings, state_shardings = sharding.maybe_update_params_sharding_with_opt(config, state_shardings)
    input_shardings = sharding.build_zero1_input_state_mesh_shardings(config, state_shardings, params_shardings)
    data_sharding = sharding.get_input_data_sharding(config, mesh)
    function, shardings, out_shardings, _, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, data_sharding, input_shardings, model, config, params_shardings
    )
    options = {
        "mesh": mesh,
        "shardings": shardings,
        "out_shardings": out_shardings,
        "donate": donated,
        "compiler_options": max_utils.parse_libtpu_flags_to_dict(config.compile_xla_flags),
    }
    # MaxText's axis names are only defined in this context, in which MaxText itself traces its step.
    in_axes = partitioning.axis_rules(config.logical_axis_rules)  # pyright: ignore[reportPrivateImportUsage]
    return in_axes(function), arguments, options
