"""Functions for programs of your own, which need no config and no trainer: they work on any pytree."""
