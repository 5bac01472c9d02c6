"""Measurements of a run, and the writers that record them.

Packages that are slow to import are imported inside functions.
"""
