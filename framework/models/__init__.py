"""Models: chains of stages."""
