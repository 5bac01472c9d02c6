"""Autotuning: find the fastest settings of a config that fit a machine, without changing what the config computes.

settings.py      overrides, applied to copies of the config; changes that the user has to allow; the chosen settings
cost_model.py    analytical estimates of the cost of settings, and whether they fit the memory
search_space.py  meshes, microbatches, remat policies, schedules, and which state to offload, how many layers of it
search.py        branch and bound over all of these; the neighbors of what it found
tuner.py         proposes settings, compiles candidates until one fits, and refines the proposal with the peak
autotune.py      entry point of `plimsoll plan --auto`: takes a request, returns a result
batch_curve.py   estimated tokens per second of the chosen settings at larger batches
run_tuning.py    entry point of a run with `memory.auto`, whose processes agree on the settings
"""

# Changes to the training that --allow permits, {name: description}. `plimsoll plan --help` lists them without importing
# JAX.
ALLOWED = {
    "rounding": "no master copy: bfloat16 weights with stochastic rounding (learner.rounding=stochastic)",
    "moments": "moments in bfloat16 (learner.moment_dtype)",
    "optimizer8bit": "AdamW with 8-bit moments and the same hyperparameters (learner.optimizer)",
    "fp8": "products of large layers in 8-bit floats, with a scale for each array (model.precision)",
    "int8": "products of large layers in 8-bit integers, with a scale for each row (model.precision)",
}
