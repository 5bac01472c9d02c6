"""The largest model or the longest row that fits a machine, and the speed of smaller ones on it.

frontier.py         the largest member of a family that fits, and smaller ones, each with the fastest settings that fit
size_family.py      larger models: width and depth grow together, as between published sizes
length_family.py    longer rows
frontier_tables.py  a frontier as a table and as a plot
"""
