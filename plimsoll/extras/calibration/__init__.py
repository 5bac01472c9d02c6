"""Achieved rates of a device, measured once by `plimsoll calibrate` and used to estimate step times.

workloads.py  the workloads that are measured
measure.py    the measurement

The rates, and the file that stores them, are described by framework/plan/step_time/device_rates.py.
"""
