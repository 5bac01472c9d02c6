"""Layers: objects that declare parameters and compute with parameters that are passed to them."""
