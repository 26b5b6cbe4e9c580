"""Folders of stores: on a file system that workers share, or at a URL that fsspec opens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dask_p2p.errors import FileError, InputError, MissingPackageError, needs


class Folder:
    """A folder by its path or URL.

    Raises `MissingPackageError` if a package for the URL is not installed, and `InputError` for an
    unknown URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with needs("fsspec", "zarr"):
            from fsspec.core import url_to_fs
        try:
            self._files, self._root = url_to_fs(path)
        except ImportError as exc:
            raise MissingPackageError(
                f"expected a package that opens {path!r}, which is not installed: {exc}."
            ) from exc
        except ValueError as exc:
            raise InputError(
                f"expected a path, or a URL that fsspec opens, got {path!r}: {exc}. Give another "
                f"one."
            ) from exc

    def __str__(self) -> str:
        return self.path

    def child(self, name: str) -> Folder:
        """Return a folder, or a file, in this one."""
        return Folder(f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def store(self) -> Any:
        """The folder as Zarr takes it."""
        from fsspec.implementations.local import LocalFileSystem

        if isinstance(self._files, LocalFileSystem):
            return Path(self._root)  # each write of a file is atomic there
        from zarr.storage import FsspecStore

        return FsspecStore.from_url(self.path)

    def exists(self) -> bool:
        """Return whether there is such a folder or file."""
        self._files.invalidate_cache()
        return bool(self._files.exists(self._root))

    def names(self) -> list[str]:
        """Return the names of all files and folders in this one; none if it does not exist.

        Raises `NotADirectoryError` for a file.
        """
        self._files.invalidate_cache()
        if self._files.isfile(self._root):
            raise NotADirectoryError(f"{self.path} is a file")
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [each.rstrip("/").rpartition("/")[2] for each in found]

    def make(self) -> None:
        """Create the folder, unless it exists."""
        self._files.makedirs(self._root, exist_ok=True)

    def read(self) -> bytes:
        """Return the contents of the file."""
        found: bytes = self._files.cat_file(self._root)
        return found

    def touch(self) -> None:
        """Create an empty file of this name."""
        self._files.touch(self._root)

    def remove(self) -> None:
        """Remove the folder or file, as far as possible."""
        with suppress(OSError):
            self._files.rm(self._root, recursive=True)


def absolute(path: Any) -> str:
    """Return an absolute path, or a URL unchanged; checks both like `Folder`."""
    if not isinstance(path, (str, Path)):
        raise InputError(
            f"expected the path or URL of a folder that all workers can write, got {path!r}. Give "
            f"a path of a shared file system."
        )
    found = str(path) if "://" in str(path) else os.path.abspath(path)
    Folder(found)
    return found


@contextmanager
def explained(folder: Folder) -> Iterator[None]:
    """Name the store in errors of the file system."""
    try:
        yield
    except OSError as exc:
        if isinstance(exc, FileError):
            raise
        raise FileError(
            f"expected a folder that can be written at {folder}, got {exc}. Make room, or give "
            f"another path."
        ) from exc
