"""Achieved rates of a device, measured once by `plimsoll calibrate` and used to estimate step times.

device_rates.py  rates by kind of work and by size, and assumed rates for devices that were never measured
workloads.py     the workloads that are measured
measure.py       the measurement
rates_store.py   the file that stores the measured rates
"""
