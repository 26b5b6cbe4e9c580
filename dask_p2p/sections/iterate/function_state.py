"""Values that the functions of `iterate` keep from call to call, such as counters.

A checkpoint does not have them. A rank that resumes begins with functions as the client sent them.
So steps of functions that have changed are not saved, and ranks resume before, or at the start.
With checkpoints in files, functions that change from step to step are refused.
"""

from __future__ import annotations

import logging
from math import inf
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any
from zlib import crc32

import cloudpickle  # Dask's functions would log an error for each object without a pickle

from dask_p2p.errors import InputError
from dask_p2p.replayable import is_constant, is_replayable
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.exchange.ends import functions_of
from dask_p2p.sections.iterate.functions.writes import can_refuse

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.iteration import Iteration

logger = logging.getLogger(__name__)

_COMPARED = 3, 4  # functions are compared after these steps
_SMALL_BYTES = 1024  # larger arrays are memory for temporaries
_GOT = (
    "got one that keeps values from step to step: a closure, attribute, global variable or keyword "
    "has changed. Give such a value as a field, {'u': u, 't': 0.0}, and return it."
)


class FunctionState:
    """The functions of one rank, and the objects that they may change."""

    def __init__(self, of: Iteration, ctx: Context) -> None:
        functions: list[Any] = [phase.function for phase in of.phases]
        functions += [spec.record.function for spec in of.series]
        functions += [each.function for frames in of.stores.frames for each in frames.computed]
        functions += [end for spec in of.fields for end in functions_of(spec.boundary)]
        functions += [] if of.until is None else [of.until]
        self._kept: list[Any] = [each for each in functions if not is_replayable(each)]
        self._kept += [each for each in of.fixed_arguments if not is_constant(each)]
        self._ctx, self._has_warned = ctx, False
        #: True if a function may keep arrays that it receives. Other libraries have their own.
        self.may_keep = bool(self._kept) and all(can_refuse(ctx.device, f) for f in functions)
        first, second = ([_sums(each) for each in self._kept] for _ in range(2))
        #: By object: checksums; None for objects without a pickle, or with another one each time.
        self._before = [a if a == b else None for a, b in zip(first, second, strict=True)]
        self._saves_files = of.stores.checkpoint is not None
        self._early: list[Any] = []  # the same after a few steps, without large arrays

    def check(self, done: int) -> None:
        """Refuse functions that change from step to step, for checkpoints in files.

        Memory for temporaries and caches is theirs: it is large, or the same after a few steps.
        """
        if not self._saves_files or done not in _COMPARED:
            return
        pairs = zip(self._kept, self._before, strict=True)
        found = [before and _sums(each, _SMALL_BYTES) for each, before in pairs]
        if done == _COMPARED[-1] and found != self._early:
            raise InputError(
                f"checkpoint: expected functions that depend on their arguments alone, {_GOT}"
            )
        self._early = found

    def has_changed(self) -> bool:
        """Return whether a function of any rank has changed since the start. A collective call."""
        if not self._kept:
            return False
        pairs = zip(self._kept, self._before, strict=True)
        is_changed = any(before not in (None, _sums(each)) for each, before in pairs)
        found = bool(self._ctx.allreduce(is_changed, "any"))
        if found and not self._has_warned and self._ctx.rank == 0:
            logger.warning(
                "iterate saves no checkpoints: expected functions that depend on their arguments "
                f"alone, {_GOT}"
            )
        self._has_warned = found
        return found


def _sums(kept: Any, most_bytes: float = inf) -> list[int] | None:
    """Return checksums of a pickled object; None if it has no pickle.

    Arrays of more than `most_bytes` are left out.
    """
    buffers: list[PickleBuffer] = []
    try:
        pickled = cloudpickle.dumps(kept, buffer_callback=buffers.append)
        parts = [pickled, *(each.raw() for each in buffers)]
        parts = [each for number, each in enumerate(parts) if not number or len(each) <= most_bytes]
    except Exception:
        return None
    return [crc32(each) for each in parts]
