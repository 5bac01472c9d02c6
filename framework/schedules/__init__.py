"""Schedules interleave the update with the backward pass: one training step per file, all with the same interface."""
