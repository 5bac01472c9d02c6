"""Training steps that differ in how they interleave the update with the backward pass.

`after_backward`, `streamed` and `in_backward` each build a step that is one program; `layerwise` runs a step as several
smaller programs. All compute the same numbers.

In the order of the step: `traits` and `memory` are the settings, and `stack_layout` stores the stacks accordingly.
`after_backward` is the plain step, made of the parts in `step`. `streamed` updates in chunks (`chunked_update`).
`backward` computes gradients layer by layer: `layer_vjp` runs one layer, `backward_state` is what the pass carries, and
`gradients` processes the result. `in_backward` updates during that pass; `optimizer_prefetch` moves a whole layer's
state meanwhile.
"""
