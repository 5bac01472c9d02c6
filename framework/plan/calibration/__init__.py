"""Achieved rates of a device, measured once by `plimsoll calibrate` and used to estimate step times.

rates.py        rates by kind of work and by size, and assumed rates for devices that were never measured
workloads.py    the workloads that are measured
measure.py      the measurement
store.py        the file that stores the measured rates
"""
