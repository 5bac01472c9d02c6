"""Predicts the memory and time of a run before it starts; see docs/plan.md."""
