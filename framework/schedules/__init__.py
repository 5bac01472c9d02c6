"""Schedules: how the update meets the backward pass. One training step per file, all with the same interface."""
