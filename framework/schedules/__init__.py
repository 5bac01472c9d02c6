"""Training steps that differ in how they interleave the update with the backward pass.

`after_backward`, `streamed` and `in_backward` each build a step that is one program; `layerwise` runs a step as several
smaller programs. All compute the same numbers.
"""
