"""Standalone functions for any JAX code: they work on any pytree and need neither a config nor a trainer."""
