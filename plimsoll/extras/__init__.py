"""Optional packages. Nothing in `framework` imports them, and none of them is needed to train.

functions: less memory for JAX code without a config (`pl.eager`, `pl.stream`, ...), docs/functions_eager.md.
flows: invertible layers, normalizing flows and their images, docs/flows.md.
autotune: chooses the settings of `memory.auto` and of `plimsoll plan --auto`, docs/autotuning.md.
largest: the largest model or the longest row that fits, `plimsoll plan --largest` and `--longest`.
plan_page: the page of `plimsoll plan --html`.
calibration: measures the speed of a device, `plimsoll calibrate`.
"""
