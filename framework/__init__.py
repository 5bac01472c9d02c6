"""Plimsoll, the library: configs, layers, models, optimizers, schedules, trainer. Imports no configs and no verbs."""
