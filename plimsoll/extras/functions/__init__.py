"""Standalone functions for any JAX code: they work on any pytree and need neither a config nor a trainer.

They share with `framework/` what computes the same: trees and paths, layers of a stack, memory transfers, update
locality, pullbacks and the 4-bit quantizer. The rest differs in what it computes. `stream` cuts a parameter by bytes
into equal slices of whatever shape the optimizer allows, where `framework.schedules.chunked_update` cuts shards into
rows by tile. `additive_coupling` has one pair of functions of any trees, where `framework.layers.reversible` has any
number of branches with losses and fixed point. LoRA here finds the products in a traced program, where
`framework.layers.lora` is a layer of a config. Regexes here match leaves, and an error names the nearest paths; those
of `framework.learner.rules` match the parameters of groups.
"""
