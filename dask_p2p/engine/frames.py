"""Frames of tasks that fail: users see those of their program, and none keeps its arrays.

A worker of Dask has the exception of a task in a variable of a frame that the exception's traceback
leads to. Such a cycle stays until Python collects garbage of its oldest generation: for minutes, on
a worker that does little. Python counts objects for that, and no bytes of arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from dask_p2p.errors import (
    BlockMismatchError,
    ConfigError,
    FileError,
    InputError,
    MissingPackageError,
    SectionError,
    without_frames,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
# Until Dask has made a text of the traceback, which takes it some milliseconds.
_DROP_S = 0.5

_PACKAGE = "dask_p2p"
# Errors about a user's program: their causes are not in frames of this package.
_ABOUT_USERS = (
    BlockMismatchError,
    ConfigError,
    FileError,
    InputError,
    MissingPackageError,
    SectionError,
)
# Packages that run tasks, and carry their exceptions.
_RUNNERS = {"dask", "distributed", "tornado", "tblib", *sys.stdlib_module_names}
_INSTALLED = "site-packages", "dist-packages"


def drops_frames(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the function of a task that shows users their frames when it fails.

    Soon afterwards its frames are dropped, with all arrays.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except BaseException as exc:
            keep_user_frames(exc)
            _drop_soon(exc)
            raise

    return run


def _drop_soon(exc: BaseException) -> None:
    try:
        from distributed import get_worker

        loop = get_worker().loop
    except (ImportError, ValueError):  # another scheduler of Dask, or none
        return
    loop.add_callback(loop.call_later, _DROP_S, without_frames, exc)


def keep_user_frames(exc: BaseException) -> None:
    """Drop the frames before those of the user's program from a traceback, and from its causes'.

    An error about the program has no frames of this package at all. An exception that no frame of
    the program leads to keeps its traceback.
    """
    seen = set[int]()
    link: BaseException | None = exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = _user_frames(link)
        link = link.__cause__ or link.__context__


def _user_frames(exc: BaseException) -> TracebackType | None:
    frames = [*_linked(exc.__traceback__)]
    packages = [str(tb.tb_frame.f_globals.get("__name__")).partition(".")[0] for tb in frames]
    runs_tasks = [package == _PACKAGE or package in _RUNNERS for package in packages]
    if isinstance(exc, _ABOUT_USERS):
        start = runs_tasks.index(False) if False in runs_tasks else len(frames)
        shown = [
            tb
            for tb, package in zip(frames[start:], packages[start:], strict=True)
            if package != _PACKAGE
        ]
    else:
        is_user = [
            not runs and not any(folder in tb.tb_frame.f_code.co_filename for folder in _INSTALLED)
            for tb, runs in zip(frames, runs_tasks, strict=True)
        ]
        shown = frames[is_user.index(True) if True in is_user else 0 :]
    result: TracebackType | None = None
    for tb in reversed(shown):
        result = TracebackType(result, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return result


def _linked(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next
