"""The output's name: it appears only when the whole output is written.

Until then the output has a hidden name beside the final one, ``.out.npy.1a2b3c4d.partial``. It is
in the same folder, so that the last step is a rename, which is atomic.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from dask_p2p.errors import FileError, P2PWarning
from dask_p2p.files.file_errors import file_errors, one_line
from dask_p2p.files.zarr_io import holds_zarr

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_output", "partial"]

_REMOVE_TRIES = 50
_REMOVE_PAUSE_S = 0.1


def check_output(name: str, source: str, *, force: bool) -> Path:
    """Resolve the output's name, and refuse what could harm the input or another file.

    Raises
    ------
    FileError
        If the output has no known suffix or no folder, is the input, or exists without ``force``.
    """
    if Path(name).suffix not in (".npy", ".zarr"):
        raise FileError(f"cannot tell the kind of {name}: end it in .npy or .zarr")
    final, read = Path(os.path.realpath(name)), Path(source)
    if final.exists() and final.samefile(read):
        raise FileError(f"{name} is the input itself; give the output another name")
    if read.is_relative_to(final) or final.is_relative_to(read):
        raise FileError(f"the input and {name} lie one inside the other; choose another folder")
    if not final.parent.is_dir():
        raise FileError(f"{final.parent} is no folder; make it, or choose another one for {name}")
    if os.path.lexists(final):
        if not force:
            raise _present(name)
        _check_replaceable(name, final)
    return final


def _present(name: str) -> FileError:
    return FileError(f"{name} is already there; --force replaces it")


def _check_replaceable(name: str, final: Path) -> None:
    """Let ``--force`` remove only what such a run may have written."""
    if final.is_dir() and not (
        final.suffix == ".zarr" and (holds_zarr(final) or not any(final.iterdir()))
    ):
        raise FileError(
            f"{name} is a folder that is no Zarr array, and --force does not remove such; remove "
            "it yourself, or choose another name"
        )
    if not final.is_dir() and not final.is_file():
        raise FileError(f"{name} is no regular file; choose another name")


@contextlib.contextmanager
def partial(final: Path, name: str, *, force: bool) -> Iterator[Path]:
    """Give a path to write to, which becomes ``final`` if all goes well and is removed if not.

    ``name`` is the user's, for messages; ``force`` lets it replace what is there.

    Raises
    ------
    FileError
        If ``final`` was created in the meantime, without ``force``, or the renaming fails.
    """
    # A name may have 255 bytes: leave room for what is put around it.
    stem = os.fsdecode(os.fsencode(final.name)[-200:])
    path = final.parent / f".{stem}.{secrets.token_hex(4)}.partial"
    try:
        yield path
        with file_errors("write", name):
            for written in itertools.chain([path], path.rglob("*")):
                _fsync(written)
            _publish(path, final, name, force=force)
            with contextlib.suppress(OSError):  # not all file systems synchronise folders
                _fsync(final.parent)
    finally:
        _remove(path, f"{path} could not be removed")


def _fsync(path: Path) -> None:
    """Wait until a file is on disk, so that it survives a crash."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(path: Path, final: Path, name: str, *, force: bool) -> None:
    if not force or not os.path.lexists(final):
        try:
            _claim(path, final)
        except OSError as exc:
            if exc.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise _present(name) from exc
        return
    _check_replaceable(name, final)  # again: it may be another one by now
    if path.is_dir() or final.is_dir():
        _swap(path, final)
    else:
        os.replace(path, final)


def _claim(path: Path, final: Path) -> None:
    """Rename, but fail if the name is taken: a plain rename would replace it."""
    if path.is_dir():
        os.mkdir(final)  # a folder may be renamed over an empty one
    else:
        with contextlib.suppress(OSError):
            return os.link(path, final)
        # There is one, or this is a file system without hard links (FAT, some network ones).
        os.close(os.open(final, os.O_CREAT | os.O_EXCL))
    try:
        os.rename(path, final)
    except BaseException:
        with contextlib.suppress(OSError):
            final.rmdir() if path.is_dir() else final.unlink()
        raise


def _swap(path: Path, final: Path) -> None:
    old = path.with_suffix(".old")
    os.rename(final, old)
    try:
        os.rename(path, final)
    except BaseException:
        os.rename(old, final)
        raise
    _remove(old, f"{final} is written, but the old one is left as {old}")


def _remove(path: Path, message: str) -> None:
    """Remove a file or folder; a worker that is lost may write into it for a while."""
    reason = ""
    for _ in range(_REMOVE_TRIES):
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        except OSError as exc:
            reason = one_line(exc)
        if not os.path.lexists(path):
            return
        time.sleep(_REMOVE_PAUSE_S)
    warnings.warn(f"{message}: {reason}; remove it", P2PWarning, stacklevel=2)
