"""Companions: other models, or earlier selves, that complete the batches of a run; see framework.program.companion."""
