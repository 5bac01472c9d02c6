"""Makes files survive a power cut: their content, and the names that lead to it, are on the disk when these return.

A file's bytes and its name reach the disk separately. After a rename without the file's fsync, the new name may lead to
0 bytes; without an fsync of the folder, the rename itself may be lost.
"""

import os
from pathlib import Path


def sync(path: str | os.PathLike[str]) -> None:
    """Put a file's content on the disk; of a folder, the names in it.

    Raises:
        OSError: there is no such file, or the disk reports an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: str | os.PathLike[str]) -> None:
    """Put a folder with all files and folders in it on the disk; not the name of the folder itself."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(os.path.join(parent, name))
        sync(parent)


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give a file or folder another name in its parent, replacing a file of that name.

    All of its content is on the disk before the name, so a power cut leaves the old state or the new one.
    """
    if os.path.isdir(source):
        sync_tree(source)
    else:
        sync(source)
    os.replace(source, target)
    sync(Path(target).parent)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder, and those above it, where they are not there."""
    path = Path(path)
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)
