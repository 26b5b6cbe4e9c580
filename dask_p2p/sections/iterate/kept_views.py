"""Views of fields that a function keeps from call to call.

A step writes into the memory of an older one. So a function that keeps a view, ``self.before = u``,
would find other values there. References to the memory show such views.
"""

from __future__ import annotations

import gc
from operator import gt
from sys import getrefcount
from threading import Lock
from typing import Any

from dask_p2p.errors import InputError
from dask_p2p.sections.iterate.local_fields import LocalFields

# A collection returns immediately if another thread collects.
_COLLECTIONS = 3
_collecting = Lock()  # shared by the ranks of one process


class KeptViews:
    """A context for calls of functions, which refuses those that keep views of fields.

    Parameters
    ----------
    local : LocalFields
        The fields. Their memory for the next step, and views for functions, exist before calls.
    is_needed : bool
        Whether a function may keep anything.
    """

    def __init__(self, local: LocalFields, is_needed: bool) -> None:
        self._local, self._is_needed = local, is_needed
        self._arrays: list[Any] = []  # that a call must not keep
        self._are_new = True  # whether there may be others
        self._before: list[int] = []  # by array: number of references before the call

    def renew(self) -> None:
        """Look for the arrays again before the next call: functions receive other views."""
        self._are_new = True

    def __enter__(self) -> None:
        if self._is_needed:
            if self._are_new:
                self._arrays, self._are_new = [*self._local.overwritten()], False
            self._before = [*map(getrefcount, self._arrays)]

    def __exit__(self, kind: Any, *given: Any) -> None:
        if kind is not None or not self._is_needed or not self._are_more():
            return
        for _ in range(_COLLECTIONS):  # cycles of objects, such as those of tracebacks
            with _collecting:
                gc.collect()
            if not self._are_more():
                return
        raise InputError(
            "expected a function that keeps no arrays that it receives, got one that keeps a "
            "field, or a part of one: a later step overwrites its values. Keep a copy, u.copy()."
        )

    def _are_more(self) -> bool:
        counts = [*map(getrefcount, self._arrays)]
        return counts != self._before and any(map(gt, counts, self._before))
