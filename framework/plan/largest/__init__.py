"""The largest model of a family that a machine carries, and how fast smaller ones are on it.

family.py      the sizes of a family: width and depth grow together, as between its published sizes
frontier.py    the largest size that fits, and smaller ones, each with the fastest settings that fit
shown.py       a frontier as a table and as a picture
"""
