"""Normalizing flows over images: invertible layers, the model, its data source, and sampling. docs/flows.md.

base.py                   the interface of invertible layers
linear.py, coupling.py, residual.py, nets.py, ends.py   the layers
model.py                  the model: a chain of levels
image_source.py           folders and arrays of images as a data pipeline
image_sampler.py          samples of a trained model, and interpolations
"""
