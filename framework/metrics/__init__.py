"""What a person sees of a run and what stays of it: writers, progress, throughput, memory in use, tables, plots.

Imports nothing else of the framework. Everything heavy (jax, rich, tensorboardX, matplotlib, wandb) is imported inside
the functions that use it: a typo on the command line has to be answered within seconds, before JAX starts.
"""
