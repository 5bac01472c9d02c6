"""Starts JAX with eight CPU devices, before a test resolves a smaller target, which would fix a smaller number."""

import jax

assert len(jax.devices()) == 8
