"""Autotuning: find the fastest settings of a config that fit a machine, without changing what the config computes.

settings.py             overrides, applied to copies of the config; the fields that the user has set
search_space.py         meshes, microbatches, remat policies, schedules, device/host placement
cost_model.py           analytical estimates of the cost of settings, with shared traces
budget.py               memory budget: decides whether settings fit, by the estimate and by earlier compilations
offload_levels.py       which state to offload, and how many layers of it
remat_mixtures.py       two remat policies in one stack: as many layers as fit use the faster one
branch_and_bound.py     search over all of these
allowed_changes.py      changes to the training itself, which the user has to allow by name
tuner.py                proposes settings and refines the proposal with the compiled peak
compile_candidates.py   compiles candidates until one fits
neighbor_comparison.py  the cost of each neighbor of the chosen settings
largest_batch.py        the largest microbatch
tuned_settings.py       the chosen settings, as JSON and as tables
tuning_cache.py         tuning results on disk
autotune.py             entry point: takes a request, returns a result
"""
