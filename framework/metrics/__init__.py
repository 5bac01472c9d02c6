"""What a person sees of a run and what stays of it: writers, progress, throughput, memory in use, tables, plots.

May import framework.accelerators and nothing else of the framework. Everything heavy (rich, tensorboardX, matplotlib,
wandb) is imported inside the functions that use it, because configs name these classes and a typo on the command line
has to be answered within seconds, before JAX starts.
"""
