"""Autotuning: find the fastest settings of a config that fit a machine, without changing what the config computes.

settings.py      overrides, applied to copies of the config; the fields that the user has set
space.py         the search space: meshes, microbatches, recomputation, schedules, placements
closed_forms.py  analytical estimates of the cost of settings, with shared traces
room.py          memory budget: do settings fit, by the estimate and by earlier compilations?
ladder.py        offload levels: which state moves to the host, and how many layers of it
mixtures.py      two remat policies in one stack: as many layers as fit use the faster one
search.py        branch and bound over all of these
allow.py         changes to the training itself, which the user has to allow by name
choosing.py      the tuner: proposes settings and refines the proposal with the compiled peak
confirm.py       compiles candidates until one fits
explain.py       the cost of each neighbor of the chosen settings
batch.py         the largest microbatch
choice.py        the chosen settings, as JSON and as tables
stored.py        tuning results on disk
answer.py        entry point: takes a question, returns an answer
"""
