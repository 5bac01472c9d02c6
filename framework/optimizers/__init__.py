"""Optimizers: optax transformations that know where their state lives."""
