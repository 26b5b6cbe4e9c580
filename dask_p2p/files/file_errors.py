"""File trouble in words: one line that says what failed, where, why, and what to do."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import TYPE_CHECKING

from dask.utils import format_bytes

from dask_p2p.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["file_errors", "no_space", "one_line"]

_ADVICE = {
    errno.ENOSPC: "free some space, or choose another folder",
    errno.EDQUOT: "free some space, or choose another folder",
    errno.EFBIG: "raise the limit of file sizes, or choose another folder",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "choose another folder",
}
_ADVICE_WORKER = {
    errno.ENOENT: "all workers must see the same files: use a folder that they share",
    errno.ESTALE: "the file was replaced while it was used: run again",
}


def one_line(exc: BaseException) -> str:
    """Text of an exception without line breaks; the name of its type where it has no text."""
    text = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    return " ".join(text.split()) or type(exc).__name__


@contextlib.contextmanager
def file_errors(doing: str, path: str, *, on_worker: bool = False) -> Iterator[None]:
    """Turn whatever goes wrong inside into a `FileError` of one line.

    Parameters
    ----------
    doing : str
        Verb after "cannot".
    path : str
        The file as the user named it.
    on_worker : bool
        Whether to name this host, and to advise for a file that only other hosts have.

    Raises
    ------
    FileError
        In place of any other exception; a `FileError` passes as it is.
    """
    try:
        yield
    except FileError:
        raise
    except Exception as exc:
        advice = _advice(exc, on_worker=on_worker)
        where = f" (worker on {socket.gethostname()})" if on_worker else ""
        text = f"cannot {doing} {path}{where}: {one_line(exc)}"
        raise FileError(f"{text}; {advice}" if advice else text) from exc


def no_space(path: str, needed: str, free_bytes: int, folder: Path) -> FileError:
    """Error of an output that does not fit on its disk.

    Parameters
    ----------
    path : str
        The output as the user named it.
    needed : str
        How much it needs.
    free_bytes : int
        How much there is.
    folder : Path
        Where.
    """
    return FileError(
        f"cannot write {path}: it needs {needed}, and only {format_bytes(free_bytes)} are free in "
        f"{folder}; {_ADVICE[errno.ENOSPC]}"
    )


def _advice(exc: Exception, *, on_worker: bool) -> str | None:
    number = exc.errno if isinstance(exc, OSError) else None
    if number is None and isinstance(exc, FileNotFoundError):  # as zarr raises it
        number = errno.ENOENT
    if number is None:
        return None
    return (_ADVICE_WORKER if on_worker else {}).get(number) or _ADVICE.get(number)
