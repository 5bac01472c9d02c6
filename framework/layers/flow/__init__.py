"""Layers of normalizing flows."""
