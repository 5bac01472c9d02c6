"""JAX starts with its eight CPU devices before a test names a target of fewer: that would be all it ever had."""

import jax

assert len(jax.devices()) == 8
