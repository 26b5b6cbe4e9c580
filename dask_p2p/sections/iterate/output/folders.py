"""Folders of stores: on a file system that workers share, or at a URL that fsspec opens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from dask_p2p.errors import FileError, InputError, MissingPackageError, P2PError, needs


class Folder:
    """A folder by its path or URL.

    Raises `MissingPackageError` if a package for the URL is not installed, and `InputError` for an
    unknown URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        if "\0" in path:
            raise InputError(f"expected a path without null characters, got {path!r}. Rename it.")
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

    @cached_property
    def store(self) -> Any:
        """The folder as Zarr takes it."""
        if self._is_local:
            return _local_store()(self._root)
        from zarr.storage import FsspecStore

        return FsspecStore.from_url(self.path)

    @property
    def _is_local(self) -> bool:
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self._files, LocalFileSystem)

    def sync(self) -> None:
        """Wait until all that this process has written to the store is on the disk."""
        if self._is_local:
            self.store.sync()

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

    def write(self, contents: bytes) -> None:
        """Create the file, with its contents on the disk; it is never there without them."""
        if not self._is_local:
            self._files.pipe_file(self._root, contents)
            return
        partial = f"{self._root}.partial"
        with open(partial, "wb") as file:
            file.write(contents)
        _sync_path(partial)
        os.replace(partial, self._root)
        _sync_path(os.path.dirname(self._root))

    def touch(self) -> None:
        """Create an empty file of this name."""
        self._files.touch(self._root)

    def remove(self) -> None:
        """Remove the folder or file, as far as possible."""
        with suppress(OSError):
            self._files.rm(self._root, recursive=True)


@cache
def _local_store() -> Any:
    """Return a class of Zarr's stores in local folders that records the files it has written."""
    from zarr.storage import LocalStore

    class RecordingStore(LocalStore):  # type: ignore[misc]
        """Each write of a file is atomic, and is on the disk after `sync`."""

        def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
            super().__init__(root, read_only=read_only)
            self._written = set[Path]()

        async def set(self, key: str, value: Any) -> None:
            self._written.add(self.root / key)
            await super().set(key, value)

        def set_sync(self, key: str, value: Any) -> None:  # of newer versions of Zarr
            self._written.add(self.root / key)
            super().set_sync(key, value)

        def sync(self) -> None:
            """Wait until the files are on the disk."""
            files, self._written = self._written, set()
            for file in files:
                _sync_path(file)
            depth = len(self.root.parent.parts)
            for folder in {parent for file in files for parent in file.parents}:
                if len(folder.parts) >= depth:
                    with suppress(OSError):  # some file systems have no such call for folders
                        _sync_path(folder)

    return RecordingStore


def _sync_path(path: str | Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


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
    """Name the store in errors of the file system, and of Zarr. Only for calls of these."""
    try:
        yield
    except (P2PError, MemoryError):
        raise
    except Exception as exc:
        cause = exc if isinstance(exc, OSError) else f"{type(exc).__name__}: {exc}"
        raise FileError(
            f"expected a folder that can be written at {folder}, got {cause}. Make room, or give "
            f"another path."
        ) from exc
