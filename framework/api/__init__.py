"""What a program that imports Plimsoll calls: `train`, `load`, `plan`, `load_config`. See docs/python.md."""
