"""Plimsoll, the library: configs, layers, models, optimizers, schedules, trainer. It imports neither `configs` nor `launch`."""
