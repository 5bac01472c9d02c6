"""What a device reaches, measured once by `plimsoll calibrate` and kept for the estimates of step times.

rates.py        rates by kind of work and by size, and what is assumed of a device that was never measured
workloads.py    the work that is measured
measure.py      the measurement
store.py        the file that keeps it
"""
