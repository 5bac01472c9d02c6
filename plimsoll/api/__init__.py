"""The Python API of Plimsoll: `train`, `load`, `plan`, `load_config`. See docs/python.md."""
