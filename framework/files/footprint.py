"""Removes the files that a refused start has written into its workdir. Standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

# A start may write into these folders before it is refused, and these files next to them. Nothing else is removed,
# because users may put their own files there meanwhile.
_FOLDERS = ("data", "health")
_FILES = ("tokenizer.json", "tokenizer_config.json")
_PREFIXES = ("tokens-", ".tokens-", "images-", ".images-", "hashes.json", ".hashes.json", "process-", ".process-")


class Footprint:
    """A record of the state of a folder at construction time.

    It records which of the paths that a start may write exist, and the contents of the small files.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        subfolders = [folder / name for name in _FOLDERS]
        # Innermost first, because `remove_folders` removes them in this order.
        candidates = [*subfolders, folder, *folder.parents]
        self._missing_folders = [path for path in candidates if not path.exists()]
        self._existing_paths = set(self._start_paths())
        self._saved_files: dict[Path, tuple[bytes, os.stat_result]] = {}
        for path in self._existing_paths:
            if path.is_file():
                self._saved_files[path] = (path.read_bytes(), path.stat())

    def undo(self) -> None:
        """Restores the content of the folder to the recorded state.

        Raises OSError: a file cannot be removed or written.
        """
        for path in self._start_paths():
            if path in self._existing_paths:
                continue
            # For a link to a folder, remove the link and keep its target.
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path, (content, status) in self._saved_files.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def remove_folders(self) -> None:
        """Removes the folders that were created since then, if they are empty."""
        for path in self._missing_folders:
            # A non-empty folder contains files that this run did not write; or the folder was never created.
            with contextlib.suppress(OSError):
                path.rmdir()

    def _start_paths(self) -> list[Path]:
        """Returns the existing paths among those that a start may write."""
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
