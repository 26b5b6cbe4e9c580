"""Collective operations that combine the values of ranks: sums, extremes and their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.plain import is_plain
from dask_p2p.errors import InputError
from dask_p2p.geometry import block_bounds, split_evenly
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.context.collectives import Collectives
from dask_p2p.sections.exchange.redistribution import Partitions
from dask_p2p.sections.exchange.values import leaves, with_leaves
from dask_p2p.sections.wire.messages.format import CALL_TAGS
from dask_p2p.types import Array, DType

_UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "any": np.logical_or,
    "all": np.logical_and,
}
_EXTREMES: dict[str, Any] = {"maxloc": np.argmax, "minloc": np.argmin}
_OPS = (*_UFUNCS, *_EXTREMES)


def check_op(op: Any) -> None:
    """Refuse an unknown operation: `InputError`."""
    if not isinstance(op, str) or op not in _OPS:
        raise InputError(
            f"op: expected one of {', '.join(_OPS)}, got {op!r}. Give one of these, or "
            f"combine the values that ctx.allgather(value) returns."
        )


def prepared(own: Array, op: str) -> Array:
    """Return an array with the dtype of the result, which `combined` needs.

    Raises `InputError` if the operation cannot combine the dtype.
    """
    try:
        if op in _EXTREMES:
            if own.dtype.kind in "biufmM":
                return own
            raise TypeError
        return own.astype(_result_dtype(own.dtype, op), copy=False)
    except TypeError:
        raise InputError(
            f"value: expected a dtype that {op!r} combines, got {own.dtype}."
        ) from None


@lru_cache(256)
def _result_dtype(dtype: DType, op: str) -> DType:
    found: DType = _UFUNCS[op].reduce(np.ones(1, dtype)).dtype
    return found


def combined(given: Sequence[Array], op: str, out: Array | None = None) -> Any:
    """Combine arrays of the same shape and dtype, in their order; into `out` if that is given.

    "maxloc" and "minloc" return a tuple: the extremes, and their positions in `given`.
    """
    if op in _EXTREMES:
        stacked = np.stack(given)
        found = _EXTREMES[op](stacked, axis=0)
        values = np.take_along_axis(stacked, found[np.newaxis], axis=0)[0]
        return values[()], found
    total, *others = given
    if not others:
        return total.copy()[()]
    for other in others:
        total = _UFUNCS[op](total, other, out=out)
        out = total if total.ndim else None
    return total[()]


class Reductions(Collectives):
    """One rank, and the operations that combine the values of all ranks."""

    _partitions: Partitions

    @cached_property
    def reduces_by_messages(self) -> bool:
        """True on GPUs of one host: a message takes one round of hosts, regions take two."""
        others = map(self._connections.is_on_other_host, range(self.size))
        return self.device.backend.on_device and not any(others)

    def allreduce(self, value: Any, op: str = "sum") -> Any:
        """Combine the values of all ranks, element by element, in rank order.

        The result has the same bits on all ranks, and in each repetition after a failure.

        Parameters
        ----------
        value : number, array, tuple or dict
            A value of the same shape and dtype on all ranks. A tuple or dict is one message.
        op : {"sum", "prod", "min", "max", "any", "all", "maxloc", "minloc"}, optional
            The operation that combines two values. "maxloc" and "minloc" return a tuple in the
            place of each value: the largest or smallest value, and the first rank that has it.

        Returns
        -------
        number, array, tuple or dict
            A NumPy scalar if `value` has no dimensions, even for CuPy; else an array of its kind.
            The dtype is that of NumPy's reductions: sums of booleans and of small integers have
            64 bits. A tuple or dict for a tuple or dict.

        Raises
        ------
        InputError
            If `op` is unknown or cannot combine the dtype of `value`.
        SectionError
            If the ranks made different calls, or passed values of different shapes or dtypes.
        UnsupportedArrayError
            If `value` is masked.
        """
        check_op(op)
        of_value = leaves(value)
        if op in _UFUNCS and any(map(self._is_in_parts, of_value)):
            return with_leaves(value, [self._reduced(leaf, op) for leaf in of_value])
        own = self._prepared(value, op)
        given = self._gathered(f'allreduce("{op}")', own)
        return self._like(value, self._combined(given, op))

    def _is_in_parts(self, leaf: Any) -> bool:
        """Return whether an array is so large that each rank reduces one part."""
        if self.size == 1 or getattr(leaf, "nbytes", 0) < tuning.current.parted_reduction_bytes:
            return False
        return isinstance(leaf, self.device.module.ndarray) and is_plain(leaf)

    def _reduced(self, leaf: Any, op: str) -> Any:
        if not self._is_in_parts(leaf):
            return self.allreduce(leaf, op)
        dtype = prepared(np.empty(0, leaf.dtype), op).dtype
        own = leaf.astype(dtype, copy=False)
        if self.reduces_by_messages:
            return self._reduced_by_messages(own, op)
        return self._reduced_by_regions(own, op)

    def _reduced_by_regions(self, own: Array, op: str) -> Array:
        """Combine the arrays of all ranks, of the same shape, element by element, in rank order.

        The arrays are the rows of a matrix. The ranks exchange its rows for columns, a
        reduce-scatter. A second exchange sends each column's sum back to all rows, an allgather. So
        a rank sends and receives twice the size of an array, for any number of ranks.
        """
        size, length, name = self.size, own.size, f'allreduce("{op}")'
        rows = RankGrid(((1,) * size, (length,)), (size, 1))
        columns = RankGrid(((size,), split_evenly(length, size)), (1, size))
        between = self._partitions.between
        there, back = self._partitions.once(
            f"{name} {length}",
            lambda: (
                between(rows, columns, (0, 1), name),
                between(columns, rows, (0, 1), f"{name}, result"),
            ),
        )
        given = there(own.reshape(1, -1))
        total = combined(given, op)
        module = self._partitions.module
        return back(module.broadcast_to(total, given.shape)).reshape(own.shape)

    def _reduced_by_messages(self, own: Array, op: str) -> Array:
        """Do the same by messages of arrays, without a matrix."""
        flat, empty = own.reshape(-1), self.device.empty
        whole = empty(flat.shape, flat.dtype)
        bounds = block_bounds(split_evenly(own.size, self.size))
        parts = [slice(*each) for each in pairwise(bounds)]
        mine, others = parts[self.rank], {*range(self.size)} - {self.rank}
        found = {rank: empty(whole[mine].shape, flat.dtype) for rank in others}
        tag = CALL_TAGS["allreduce()"]
        self._exchanged({rank: flat[parts[rank]] for rank in others}, tag, found)
        found[self.rank] = flat[mine]
        combined([found[rank] for rank in range(self.size)], op, whole[mine])
        into = {rank: whole[parts[rank]] for rank in others}
        self._exchanged(dict.fromkeys(others, whole[mine]), tag, into)
        return whole.reshape(own.shape)

    def reduce(self, value: Any, op: str = "sum", root: int = 0) -> Any:
        """Combine the values of all ranks on one rank.

        Errors are those of `allreduce`.

        Parameters
        ----------
        value, op : optional
            The arguments of `allreduce`.
        root : int, optional
            The rank that gets the result. By default 0.

        Returns
        -------
        number, array, tuple, dict or None
            The result of `allreduce` on the rank `root`, and None on the others.
        """
        own = self._prepared(value, op)
        given = self._at_root(own, f'reduce("{op}", root={self._checked_root(root)})', root)
        return None if given is None else self._like(value, self._combined(given, op))

    def scan(self, value: Any, op: str = "sum") -> Any:
        """Combine the values of this rank and of all ranks before it.

        Parameters, result and errors are those of `allreduce`.
        """
        own = self._prepared(value, op)
        given = self._gathered(f'scan("{op}")', own)[: self.rank + 1]
        return self._like(value, self._combined(given, op))

    def exscan(self, value: Any, op: str = "sum") -> Any:
        """Combine the values of all ranks before this one; None on rank 0.

        Parameters, result and errors are those of `allreduce`. The sum of the ranks' lengths is
        the position of a rank's first element in the whole array.
        """
        own = self._prepared(value, op)
        given = self._gathered(f'exscan("{op}")', own)[: self.rank]
        return self._like(value, self._combined(given, op)) if given else None

    def _prepared(self, value: Any, op: Any) -> list[Array]:
        check_op(op)
        return [prepared(self._numbers(leaf), op) for leaf in leaves(value)]

    def _combined(self, given: Sequence[Sequence[Array]], op: str) -> list[Any]:
        return [combined(each, op) for each in zip(*given, strict=True)]
