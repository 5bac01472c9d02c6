"""Scaling models: the maximal update parametrization, and ladders of sizes."""
