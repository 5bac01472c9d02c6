"""The library: configs, layers, schedules, checkpoints and plans. `import plimsoll` has its public names."""

if __name__ == "framework":
    # In a checkout, this folder is also importable under its old name. A second copy of each module would define
    # classes that differ from the originals, so the old names are made aliases.
    from plimsoll import old_imports

    old_imports.alias_framework()
