"""Optimizers: optax transformations that define the layout and memory kind of their state."""
