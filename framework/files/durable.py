"""Makes files survive a power failure: when these functions return, content and file names are on disk.

A file's bytes and its name reach the disk separately. After a rename without an fsync of the file, the new name may
refer to 0 bytes; without an fsync of the folder, the rename itself may be lost.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Number of files to flush at a time.
_NUM_THREADS = 8


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file's content to disk; for a folder, the names in it.

    Raises:
        OSError: there is no such file, or the disk reports an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: str | os.PathLike[str]) -> None:
    """Flush a folder and all files and folders in it to disk, except the name of the folder itself."""
    paths: list[str] = []
    for parent, _, names in os.walk(folder, topdown=False):
        paths += [os.path.join(parent, name) for name in names]
        paths.append(parent)
    # Together, they share commits of the file system's journal; one after the other, each may wait for its own.
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        list(pool.map(sync, paths))


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file or folder in its parent, replacing a file of that name.

    Its content is flushed to disk before the name, so a power failure leaves either the old state or the new one.
    """
    if os.path.isdir(source):
        sync_tree(source)
    else:
        sync(source)
    os.replace(source, target)
    sync(Path(target).parent)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder, and its missing parents."""
    path = Path(path)
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)
