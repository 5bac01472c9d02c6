"""Benchmarks for developers of Plimsoll."""
