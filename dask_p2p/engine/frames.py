"""Frames of tasks that fail, which have all their arrays.

A worker of Dask has the exception of a task in a variable of a frame that the exception's traceback
leads to. Such a cycle stays until Python collects garbage of its oldest generation: for minutes, on
a worker that does little. Python counts objects for that, and no bytes of arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from dask_p2p.errors import without_frames

_P = ParamSpec("_P")
_T = TypeVar("_T")
# Until Dask has made a text of the traceback, which takes it some milliseconds.
_DROP_S = 0.5


def drops_frames(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the function of a task with all that it had going soon after it has failed."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except BaseException as exc:
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
