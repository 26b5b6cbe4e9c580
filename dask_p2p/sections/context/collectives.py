"""Collective operations on arrays of numbers: gathers, reductions and scans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.base import check_plain, is_plain
from dask_p2p.errors import InputError, MissingPackageError
from dask_p2p.geometry import block_bounds, split_evenly
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.context.messages import Messages
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.redistribution import Partitions
from dask_p2p.sections.exchange.regions import shortened
from dask_p2p.sections.exchange.values import NUMBER_KINDS, as_numbers, leaves, with_leaves
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.sections.wire.frames import CALL_TAGS
from dask_p2p.types import Array, DType


class Collectives(Messages):
    """The arrays of all ranks of a communicator, and large reductions."""

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Connections,
        device: Host,
        partitions: Partitions | None,  # of its arrays; None: large sums go by messages
        reads_memory: bool = True,
        name: str = "",
    ) -> None:
        super().__init__(rank, size, connections, device, reads_memory, name)
        self._for_sums = partitions

    def _numbers(self, value: Any) -> Any:
        check_plain("value", value)
        numbers = as_numbers(self.device.to_host(value))
        if numbers.dtype.kind not in NUMBER_KINDS:
            dtype = getattr(value, "dtype", type(value).__name__)
            raise InputError(f"value: expected numbers, got {dtype}. Convert it to numbers first.")
        return numbers

    def _leaf_arrays(self, value: Any) -> list[Array]:
        return [self._numbers(leaf) for leaf in leaves(value)]

    def _prepared(self, value: Any, op: Any) -> list[Array]:
        check_op(op)
        return [convert_for(array, op) for array in self._leaf_arrays(value)]

    def _stacked(self, value: Any, rank_arrays: Sequence[Sequence[Array]] | None) -> Any:
        if not rank_arrays:
            return None  # on ranks that receive none
        return self._like(value, [np.stack(arrays) for arrays in zip(*rank_arrays, strict=True)])

    def _combined(self, value: Any, rank_arrays: Sequence[Sequence[Array]] | None, op: str) -> Any:
        if not rank_arrays:
            return None  # on ranks that receive none
        by_leaf = zip(*rank_arrays, strict=True)
        return self._like(value, [combine_arrays(arrays, op) for arrays in by_leaf])

    def _like(self, value: Any, arrays: Sequence[Any]) -> Any:
        """Return a value with the structure and the kinds of arrays of another one."""
        from_host = self.device.from_host
        converted = [
            tuple([from_host(part, like) for part in array])
            if isinstance(array, tuple)
            else from_host(array, like)
            for like, array in zip(leaves(value), arrays, strict=True)
        ]
        return with_leaves(value, converted)

    def _gather_all(self, call: str, arrays: Sequence[Array]) -> list[Sequence[Array]]:
        """Return the arrays of all ranks, by rank: those of this rank itself, read-only others."""
        data, text = b"".join([array.tobytes() for array in arrays]), text_of_arrays(call, arrays)
        received = enumerate(self._connections.gather(text, data))
        return [
            arrays if rank == self.rank else arrays_in(message, arrays)
            for rank, message in received
        ]

    def _gather_at(self, root: int, call: str, arrays: Sequence[Array]) -> list[list[Array]] | None:
        """Return the arrays of all ranks, by rank, on the rank `root`; None on the others."""
        data, text = b"".join([array.tobytes() for array in arrays]), text_of_arrays(call, arrays)
        # Each rank also receives a header: ranks with different roots would wait for each other.
        if self.rank != root:
            self._connections.exchange(text, {root: data}, {root: bytearray()})
            return None
        senders = [rank for rank in range(self.size) if rank != root]
        receives = {rank: bytearray(len(data)) for rank in senders}
        received = self._connections.exchange(text, dict.fromkeys(senders, b""), dict(receives))
        return [arrays_in(received.get(rank, data), arrays) for rank in range(self.size)]

    @cached_property
    def _uses_messages(self) -> bool:
        """True on GPUs of one host: a message takes one round of hosts, regions take two."""
        is_remote = map(self._connections.is_on_other_host, range(self.size))
        return self.device.backend.on_device and not any(is_remote)

    def _is_in_parts(self, leaf: Any) -> bool:
        if self.size == 1 or getattr(leaf, "nbytes", 0) < tuning.current.parted_reduction_bytes:
            return False
        return isinstance(leaf, self.device.module.ndarray) and is_plain(leaf)

    def _reduced(self, leaf: Any, op: str) -> Any:
        if not self._is_in_parts(leaf):
            return self._combined(
                leaf, self._gather_all(f'allreduce("{op}")', self._prepared(leaf, op)), op
            )
        dtype = convert_for(np.empty(0, leaf.dtype), op).dtype
        addend = leaf.astype(dtype, copy=False)
        if self._for_sums is None or self._uses_messages:
            return self._reduced_by_messages(addend, op)
        return self._reduced_by_regions(self._for_sums, addend, op)

    def _reduced_by_regions(self, partitions: Partitions, array: Array, op: str) -> Array:
        """Combine the arrays of all ranks, of the same shape, element by element, in rank order.

        The arrays are the rows of a matrix. The ranks exchange its rows for columns, a
        reduce-scatter. A second exchange sends each column's sum back to all rows, an allgather. So
        a rank sends and receives twice the size of an array, for any number of ranks.
        """
        size, length, name = self.size, array.size, f'allreduce("{op}")'
        rows = RankGrid(((1,) * size, (length,)), (size, 1))
        columns = RankGrid(((size,), split_evenly(length, size)), (1, size))
        between = partitions.between
        scatter, collect = partitions.once(
            f"{name} {length}",
            lambda: (
                between(rows, columns, (0, 1), name),
                between(columns, rows, (0, 1), f"{name}, result"),
            ),
        )
        row_block = scatter(array.reshape(1, -1))
        total = combine_arrays(row_block, op)
        totals = self.device.module.broadcast_to(total, row_block.shape)
        return collect(totals).reshape(array.shape)

    def _reduced_by_messages(self, array: Array, op: str) -> Array:
        """Do the same by messages of arrays, without a matrix."""
        flat, empty = array.reshape(-1), self.device.empty
        total = empty(flat.shape, flat.dtype)
        bounds = block_bounds(split_evenly(array.size, self.size))
        parts = [slice(*bound) for bound in pairwise(bounds)]
        local_part, peers = parts[self.rank], {*range(self.size)} - {self.rank}
        received = {rank: empty(total[local_part].shape, flat.dtype) for rank in peers}
        tag = CALL_TAGS["allreduce()"]
        self._exchange({rank: flat[parts[rank]] for rank in peers}, tag, received)
        received[self.rank] = flat[local_part]
        combine_arrays([received[rank] for rank in range(self.size)], op, total[local_part])
        into = {rank: total[parts[rank]] for rank in peers}
        self._exchange(dict.fromkeys(peers, total[local_part]), tag, into)
        return total.reshape(array.shape)


def text_of_arrays(call: str, arrays: Sequence[Array]) -> str:
    """Return the text of a call with arrays, different for other shapes and dtypes."""
    return _text_of_call(call, *[(array.dtype, array.shape) for array in arrays])


def arrays_in(data: Any, like: Sequence[Array]) -> list[Array]:
    """Return the arrays in the bytes of a message, with the shapes and dtypes of other arrays."""
    arrays, at = [], 0
    for array in like:
        arrays.append(np.ndarray(array.shape, array.dtype, data, at))
        at += array.nbytes
    return arrays


@lru_cache(1024)
def _text_of_call(call: str, *kinds: tuple[DType, tuple[int, ...]]) -> str:
    return shortened(f"{call} of {', '.join(text_of_kind(*kind) for kind in kinds)}")


def text_of_kind(dtype: DType, shape: tuple[int, ...]) -> str:
    """Return the name of a number or an array in errors.

    >>> text_of_kind(np.dtype("f8"), ()), text_of_kind(np.dtype("i4"), (3, 2))
    ('a float64 number', 'an int32 array of shape (3, 2)')
    """
    article = "an" if str(dtype)[0] in "aeiou" else "a"
    return f"{article} {dtype} {f'array of shape {shape}' if shape else 'number'}"


# Operations that combine the values of ranks.

UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "any": np.logical_or,
    "all": np.logical_and,
}
_EXTREMES: dict[str, Any] = {"maxloc": np.argmax, "minloc": np.argmin}
_OPS = (*UFUNCS, *_EXTREMES)


def check_op(op: Any) -> None:
    """Refuse an unknown operation: `InputError`."""
    if not isinstance(op, str) or op not in _OPS:
        raise InputError(
            f"op: expected one of {', '.join(_OPS)}, got {op!r}. Give one of these, or "
            f"combine the values that ctx.allgather(value) returns."
        )


def convert_for(array: Array, op: str) -> Array:
    """Return an array with the dtype of the result, which `combine_arrays` needs.

    Raises `InputError` if the operation cannot combine the dtype.
    """
    try:
        if op in _EXTREMES:
            if array.dtype.kind in "biufmM":
                return array
            raise TypeError
        return array.astype(_result_dtype(array.dtype, op), copy=False)
    except TypeError:
        raise InputError(
            f"value: expected a dtype that {op!r} combines, got {array.dtype}."
        ) from None


@lru_cache(256)
def _result_dtype(dtype: DType, op: str) -> DType:
    result: DType = UFUNCS[op].reduce(np.ones(1, dtype)).dtype
    return result


def combine_arrays(arrays: Sequence[Array], op: str, out: Array | None = None) -> Any:
    """Combine arrays of the same shape and dtype, in their order; into `out` if that is given.

    "maxloc" and "minloc" return a tuple: the extremes, and their positions in `arrays`.
    """
    if op in _EXTREMES:
        stacked = np.stack(arrays)
        extremes = _EXTREMES[op](stacked, axis=0)
        values = np.take_along_axis(stacked, extremes[np.newaxis], axis=0)[0]
        return values[()], extremes
    total, *addends = arrays
    if not addends:
        return total.copy()[()]
    for addend in addends:
        total = UFUNCS[op](total, addend, out=out)
        out = total if total.ndim else None
    return total[()]


def new_nccl_id() -> Array:
    """Return a new identifier for NCCL: whether it is made of bytes, and its numbers."""
    try:
        from cupy.cuda import nccl

        if nccl.available:
            nccl_id = nccl.get_unique_id()
            return np.array([isinstance(nccl_id, bytes), *nccl_id], np.int64)
    except ImportError:
        pass
    raise MissingPackageError(
        "nccl_id: expected CuPy with NCCL on the worker of rank 0, got none. Install CuPy there, "
        "for example by pip install cupy-cuda13x, and nvidia-nccl-cu13 for NCCL.",
        name="cupy",
    )
