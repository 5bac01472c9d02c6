"""Functions for JAX code of one's own: they work on any pytree, and need no config and no trainer."""
