"""Errors of files as one line: what failed, where, why, and what to do."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import TYPE_CHECKING, TypeVar

from dask.utils import format_bytes

from dask_p2p.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

__all__ = ["file_errors", "no_space", "on_worker", "one_line"]

T = TypeVar("T")

_FREE = "free some space, or choose another folder"
_ADVICE = {
    errno.ENOSPC: _FREE,
    errno.EDQUOT: _FREE,
    errno.EFBIG: "raise the limit of file sizes, or choose another folder",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose another folder",
}
_ADVICE_WORKER = _ADVICE | {
    errno.ENOENT: "all workers must see the same files: use a folder that they share",
    errno.ESTALE: "the file was replaced while it was used: run again",
}


def one_line(exc: BaseException) -> str:
    """Text of an exception without line breaks; the name of its type where it has no text."""
    text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return " ".join(text.split()) or type(exc).__name__


@contextlib.contextmanager
def file_errors(doing: str, path: str, advice: Mapping[int, str] = _ADVICE) -> Iterator[None]:
    """Turn any error inside into a `FileError` of one line: cannot ``doing`` ..."""
    try:
        yield
    except FileError:
        raise
    except Exception as exc:
        # Zarr raises a FileNotFoundError without a number.
        missing = errno.ENOENT if isinstance(exc, FileNotFoundError) else 0
        hint = advice.get(getattr(exc, "errno", None) or missing)
        more = f"; {hint}" if hint else ""
        raise FileError(f"cannot {doing} {path}: {one_line(exc)}{more}") from exc


def on_worker(doing: str, path: str, action: Callable[[], T]) -> T:
    """Call `action`, and turn any error into a `FileError` that names this host too.

    The error has no cause or context: Dask would send them along, but cannot send all exceptions.
    """
    where = f"{path} (worker on {socket.gethostname()})"
    try:
        with file_errors(doing, where, _ADVICE_WORKER):
            return action()
    except FileError as exc:
        error = FileError(str(exc))
    raise error


def no_space(path: str, needed: str, free_bytes: int, folder: Path) -> FileError:
    """Return the error for an output that does not fit on the disk of its folder."""
    free = format_bytes(free_bytes)
    return FileError(
        f"cannot write {path}: it needs {needed}, and only {free} are free in {folder}; {_FREE}"
    )
