"""The load line: the fastest settings of a config that fit a machine, which compute what the config computes.

settings.py      overrides, applied to copies; which fields somebody has set
space.py         what may be chosen: meshes, microbatches, recomputation, schedules, placements
closed_forms.py  what settings cost, with traces that many of them share
room.py          whether they fit, by the closed form and by what the compiler said of others
ladder.py        what moves to the host, and how many layers of it
mixtures.py      layers of two policies, as many with the faster one as fit
search.py        branch and bound over all of these
allow.py         what of the training itself may be changed, if it is said
choosing.py      proposes settings, hears what the compiler says, and proposes again
confirm.py       the compiler
explain.py       what each neighbour of the choice would have cost
batch.py         the largest microbatch
choice.py        what was chosen, as JSON and as lines
stored.py        choices on disk
answer.py        all of it: a question, and its answer
"""
