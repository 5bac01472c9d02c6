"""What a start that is refused has written into its workdir, to be taken away again. Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

# What a start may write before it is refused: into these folders, and these files beside them. Nothing else is removed,
# as somebody may put files of their own there meanwhile.
_FOLDERS = ("data", "health")
_FILES = ("tokenizer.json", "tokenizer_config.json")
_PREFIXES = ("tokens-", ".tokens-", "hashes.json", ".hashes.json", "process-", ".process-")


class Footprint:
    """The state of `folder` when this is made: which parts of it there are, and what the small files hold."""

    def __init__(self, folder: Path):
        self._folder = folder
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        self._made = [*(folder / name for name in _FOLDERS if not (folder / name).exists()), *missing]
        self._before = set(self._ours())
        self._contents = {path: (path.read_bytes(), path.stat()) for path in self._before if path.is_file()}

    def undo(self) -> None:
        """Puts what is in the folder back into that state. Raises OSError: it cannot be removed or written."""
        for path in self._ours():
            if path in self._before:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path, (content, facts) in self._contents.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
                os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))

    def remove_folders(self) -> None:
        """Removes the folders that were made since, if nothing is in them."""
        for path in self._made:  # the innermost first
            with contextlib.suppress(OSError):  # not empty: somebody else's files are in it; or never made
                path.rmdir()

    def _ours(self) -> list[Path]:
        """What is there now of all that a start may write."""
        files = [path for name in _FILES if (path := self._folder / name).exists()]
        folders = [self._folder / name for name in _FOLDERS if (self._folder / name).is_dir()]
        inside = [entry for folder in folders for entry in folder.iterdir() if entry.name.startswith(_PREFIXES)]
        return [*files, *inside]
