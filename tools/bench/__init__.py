"""Benchmarks, for the people who develop Plimsoll."""
