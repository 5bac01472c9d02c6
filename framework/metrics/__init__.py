"""Measurements of a run, and the writers that record them.

Packages that take long to import are imported inside functions.
"""
