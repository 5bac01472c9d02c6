"""Removes what a start that is refused has written into its workdir. Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

# A start may write into these folders before it is refused, and these files beside them. Nothing
# else is removed, as somebody may put files of their own there meanwhile.
_FOLDERS = ("data", "health")
_FILES = ("tokenizer.json", "tokenizer_config.json")
_PREFIXES = ("tokens-", ".tokens-", "hashes.json", ".hashes.json", "process-", ".process-")


class Footprint:
    """The state of a folder when this object is made.

    It records which of the paths that a start may write exist, and the contents of the small files.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        subfolders = [folder / name for name in _FOLDERS]
        # The innermost first, as `remove_folders` removes them in this order.
        candidates = [*subfolders, folder, *folder.parents]
        self._missing_folders = [path for path in candidates if not path.exists()]
        self._existing_paths = set(self._start_paths())
        self._saved_files: dict[Path, tuple[bytes, os.stat_result]] = {}
        for path in self._existing_paths:
            if path.is_file():
                self._saved_files[path] = (path.read_bytes(), path.stat())

    def undo(self) -> None:
        """Puts the content of the folder back into that state.

        Raises OSError: a file cannot be removed or written.
        """
        for path in self._start_paths():
            if path in self._existing_paths:
                continue
            # A link to a folder is removed itself, and what it leads to stays.
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path, (content, status) in self._saved_files.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def remove_folders(self) -> None:
        """Removes the folders that were made since, if nothing is in them."""
        for path in self._missing_folders:
            # One that is not empty has somebody else's files in it; or it was never made.
            with contextlib.suppress(OSError):
                path.rmdir()

    def _start_paths(self) -> list[Path]:
        """Returns the paths, of all that a start may write, that exist now."""
        paths = []
        for name in _FILES:
            path = self._folder / name
            if path.exists():
                paths.append(path)
        for name in _FOLDERS:
            folder = self._folder / name
            if folder.is_dir():
                paths += [entry for entry in folder.iterdir() if entry.name.startswith(_PREFIXES)]
        return paths
