"""Mixtures of experts: a router, experts by grouped products, and where their tokens go."""
