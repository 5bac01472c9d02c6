"""The largest model of a family that fits a machine, and the speed of smaller ones on it.

size_family.py      the sizes of a family: width and depth grow together, as between its published sizes
size_frontier.py    the largest size that fits, and smaller ones, each with the fastest settings that fit
frontier_tables.py  a frontier as a table and as a plot
"""
