"""Functions for code of one's own: each takes any JAX function and any pytree, and needs no config and no trainer."""
