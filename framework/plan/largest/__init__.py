"""The largest model of a family that fits a machine, and the speed of smaller ones on it.

family.py      the sizes of a family: width and depth grow together, as between its published sizes
frontier.py    the largest size that fits, and smaller ones, each with the fastest settings that fit
shown.py       a frontier as a table and as a plot
"""
