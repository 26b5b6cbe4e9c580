"""Communicators: some ranks of a section, with messages and collective operations of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.base import check_plain, is_plain
from dask_p2p.errors import InputError, MissingPackageError
from dask_p2p.geometry import block_bounds, split_evenly
from dask_p2p.inputs import as_integer
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.context.messages import Messaging
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.redistribution import Partitions
from dask_p2p.sections.exchange.values import (
    NUMBER_KINDS,
    UFUNCS,
    arrays_in,
    as_numbers,
    check_op,
    combine_arrays,
    convert_for,
    is_stackable,
    leaves,
    text_of_arrays,
    text_of_kind,
    with_leaves,
)
from dask_p2p.sections.wire.connections import Connections, GroupConnections
from dask_p2p.sections.wire.frames import CALL_TAGS
from dask_p2p.types import Array


class Communicator(Messaging):
    """Some of the ranks of a section, from `Context.along`, as a communicator of MPI.

    It has the methods of `Context` that exchange values, from `send` to `allreduce`. All of its
    ranks must call the same methods in the same order.

    Attributes
    ----------
    rank, size : int
        This rank in the communicator, and the number of its ranks.
    """

    _partitions: Partitions

    def __init__(
        self,
        rank: int,  # this rank
        size: int,  # number of ranks
        connections: Connections,  # connections to the other ranks
        device: Host,  # of the arrays
        name: str = "",  # the same on its ranks; "" for all ranks of the section
    ) -> None:
        super().__init__(rank, size, connections, device)
        self.communicator = crc32(name.encode())

    def barrier(self) -> None:
        """Wait until all ranks have called this method.

        Raises
        ------
        SectionError
            If the ranks made different calls.
        """
        self._connections.gather("barrier()", b"")

    def allgather(self, value: Any, ragged: bool = False) -> Any:
        """Return the values of all ranks, in rank order.

        Parameters
        ----------
        value : object
            The value of this rank. Numbers and arrays have the same shape and dtype on all ranks.
        ragged : bool, optional
            True if shapes, dtypes and types may differ.

        Returns
        -------
        numpy.ndarray or cupy.ndarray, tuple, dict or list
            An array with one additional dimension, the first, which is indexed by rank. For a tuple
            or dict of numbers and arrays one for each of them. For any other object, such as text
            or a list, and with `ragged`, a list of the values.

        Raises
        ------
        InputError
            If `value` cannot be pickled.
        SectionError
            If the ranks made different calls, or passed values of different shapes or dtypes.
        """
        if ragged or not is_stackable(value, self.device):
            tag = CALL_TAGS["allgather(ragged=True)" if ragged else "allgather() of an object"]
            return self._exchanged(dict.fromkeys(range(self.size), value), tag)
        return self._like(
            value, self._stacked(self._gathered("allgather()", self._leaf_arrays(value)))
        )

    def gather(self, value: Any, root: int = 0, ragged: bool = False) -> Any:
        """Return the values of all ranks on one rank, and None on the others.

        Parameters
        ----------
        value : object
            The value of this rank. Numbers and arrays have the same shape and dtype on all ranks.
        root : int, optional
            The rank that gets the values. By default 0.
        ragged : bool, optional
            True if shapes, dtypes and types may differ.

        Returns
        -------
        array, tuple, dict, list or None
            The result of `allgather` on the rank `root`.

        Raises
        ------
        InputError
            If there is no such rank. Otherwise the errors are those of `allgather`.
        """
        root = self._checked_root(root)
        if not ragged and is_stackable(value, self.device):
            parts = self._at_root(self._leaf_arrays(value), f"gather(root={root})", root)
            return None if parts is None else self._like(value, self._stacked(parts))
        tag = CALL_TAGS["gather(ragged=True)" if ragged else "gather() of an object"]
        sent = self._sent(value, root, tag)
        received = None
        if self.rank == root:
            received = [self._next(rank, tag) for rank in range(self.size)]
        sent.wait()
        return received

    def scatter(self, parts: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Return the value that one rank has for this one.

        Parameters
        ----------
        parts : sequence, optional
            On the rank `root` a value for each rank, as for `alltoall`. It does not count on the
            others.
        root : int, optional
            The rank that sends the values. By default 0.

        Returns
        -------
        object
            The value for this rank.

        Raises
        ------
        InputError
            If there is no such rank, or `parts` has another length than `size` on the rank `root`,
            or a value cannot be pickled.
        SectionError
            If the ranks made different calls.
        """
        root = self._checked_root(root)
        if self.rank == root:
            self._check_parts("parts", parts)
        return self._from_root(root, () if parts is None else parts, CALL_TAGS["scatter()"])

    def bcast(self, value: Any = None, root: int = 0) -> Any:
        """Return the value of one rank. Only that rank needs to have it.

        Parameters
        ----------
        value : object
            The value on the rank `root`. It does not count on the others.
        root : int, optional
            The rank that sends its value. By default 0.

        Returns
        -------
        object
            A copy of the value.

        Raises
        ------
        InputError
            If there is no such rank, or the value cannot be pickled.
        SectionError
            If the ranks made different calls.
        """
        return self._from_root(self._checked_root(root), [value] * self.size, CALL_TAGS["bcast()"])

    def _from_root(self, root: int, parts: Sequence[Any], tag: int) -> Any:
        """Return the value that one rank has for this one; `parts` count on that rank."""
        values = parts if self.rank == root else ()
        sent = [self._sent(part, rank, tag) for rank, part in enumerate(values)]
        received = self._next(root, tag)
        for message in sent:
            message.wait()
        return received

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of the rank `root`.

        Parameters
        ----------
        value : number or array
            A value of the same shape and dtype on all ranks. Only the root's value counts.
        root : int, optional
            The rank that sends its value. By default 0.

        Returns
        -------
        number or array
            A NumPy scalar if `value` has no dimensions; else an array of its kind.

        Raises
        ------
        InputError
            If there is no such rank, or `value` holds no numbers.
        SectionError
            As for `allreduce`.
        UnsupportedArrayError
            If `value` is masked.
        """
        root = self._checked_root(root)
        numbers = np.array(self._numbers(value))
        receivers = [rank for rank in range(self.size) if rank != self.rank]
        call = f"broadcast(root={root}) of {text_of_kind(numbers.dtype, numbers.shape)}"
        if self.rank == root:
            data = numbers.tobytes()
            self._connections.exchange(call, dict.fromkeys(receivers, data), {})
        else:
            received = self._connections.exchange(call, {}, {root: bytearray(numbers.nbytes)})
            numbers = np.frombuffer(received[root], numbers.dtype).reshape(numbers.shape)
        return self.device.from_host(numbers[()], value)

    def _checked_root(self, root: Any) -> int:
        number = -1 if isinstance(root, bool) else as_integer(root, -1)
        if number not in range(self.size):
            raise InputError(
                f"root: expected a rank below {self.size}, got {root!r}. Give the ctx.rank that "
                f"sends or gets the value, such as 0."
            )
        return number

    def _numbers(self, value: Any) -> Any:
        check_plain("value", value)
        numbers = as_numbers(self.device.to_host(value))
        if numbers.dtype.kind not in NUMBER_KINDS:
            dtype = getattr(value, "dtype", type(value).__name__)
            raise InputError(f"value: expected numbers, got {dtype}. Convert it to numbers first.")
        return numbers

    def _leaf_arrays(self, value: Any) -> list[Array]:
        return [self._numbers(leaf) for leaf in leaves(value)]

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

    def _stacked(self, rank_arrays: Sequence[Sequence[Array]]) -> list[Array]:
        return [np.stack(arrays) for arrays in zip(*rank_arrays, strict=True)]

    def _gathered(self, call: str, arrays: Sequence[Array]) -> list[Sequence[Array]]:
        """Return the arrays of all ranks, by rank: those of this rank itself, read-only others."""
        data, text = b"".join([array.tobytes() for array in arrays]), text_of_arrays(call, arrays)
        received = enumerate(self._connections.gather(text, data))
        return [
            arrays if rank == self.rank else arrays_in(message, arrays)
            for rank, message in received
        ]

    def _at_root(self, arrays: Sequence[Array], call: str, root: int) -> list[list[Array]] | None:
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
    def reduces_by_messages(self) -> bool:
        """True on GPUs of one host: a message takes one round of hosts, regions take two."""
        is_remote = map(self._connections.is_on_other_host, range(self.size))
        return self.device.backend.on_device and not any(is_remote)

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
        if op in UFUNCS and any(map(self._is_in_parts, of_value)):
            return with_leaves(value, [self._reduced(leaf, op) for leaf in of_value])
        leaf_arrays = self._prepared(value, op)
        rank_arrays = self._gathered(f'allreduce("{op}")', leaf_arrays)
        return self._like(value, self._combined(rank_arrays, op))

    def _is_in_parts(self, leaf: Any) -> bool:
        if self.size == 1 or getattr(leaf, "nbytes", 0) < tuning.current.parted_reduction_bytes:
            return False
        return isinstance(leaf, self.device.module.ndarray) and is_plain(leaf)

    def _reduced(self, leaf: Any, op: str) -> Any:
        if not self._is_in_parts(leaf):
            return self.allreduce(leaf, op)
        dtype = convert_for(np.empty(0, leaf.dtype), op).dtype
        addend = leaf.astype(dtype, copy=False)
        if self.reduces_by_messages:
            return self._reduced_by_messages(addend, op)
        return self._reduced_by_regions(addend, op)

    def _reduced_by_regions(self, array: Array, op: str) -> Array:
        """Combine the arrays of all ranks, of the same shape, element by element, in rank order.

        The arrays are the rows of a matrix. The ranks exchange its rows for columns, a
        reduce-scatter. A second exchange sends each column's sum back to all rows, an allgather. So
        a rank sends and receives twice the size of an array, for any number of ranks.
        """
        size, length, name = self.size, array.size, f'allreduce("{op}")'
        rows = RankGrid(((1,) * size, (length,)), (size, 1))
        columns = RankGrid(((size,), split_evenly(length, size)), (1, size))
        between = self._partitions.between
        scatter, collect = self._partitions.once(
            f"{name} {length}",
            lambda: (
                between(rows, columns, (0, 1), name),
                between(columns, rows, (0, 1), f"{name}, result"),
            ),
        )
        row_block = scatter(array.reshape(1, -1))
        total = combine_arrays(row_block, op)
        module = self._partitions.module
        return collect(module.broadcast_to(total, row_block.shape)).reshape(array.shape)

    def _reduced_by_messages(self, array: Array, op: str) -> Array:
        """Do the same by messages of arrays, without a matrix."""
        flat, empty = array.reshape(-1), self.device.empty
        total = empty(flat.shape, flat.dtype)
        bounds = block_bounds(split_evenly(array.size, self.size))
        parts = [slice(*bound) for bound in pairwise(bounds)]
        local_part, peers = parts[self.rank], {*range(self.size)} - {self.rank}
        received = {rank: empty(total[local_part].shape, flat.dtype) for rank in peers}
        tag = CALL_TAGS["allreduce()"]
        self._exchanged({rank: flat[parts[rank]] for rank in peers}, tag, received)
        received[self.rank] = flat[local_part]
        combine_arrays([received[rank] for rank in range(self.size)], op, total[local_part])
        into = {rank: total[parts[rank]] for rank in peers}
        self._exchanged(dict.fromkeys(peers, total[local_part]), tag, into)
        return total.reshape(array.shape)

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
        leaf_arrays = self._prepared(value, op)
        rank_arrays = self._at_root(
            leaf_arrays, f'reduce("{op}", root={self._checked_root(root)})', root
        )
        return None if rank_arrays is None else self._like(value, self._combined(rank_arrays, op))

    def scan(self, value: Any, op: str = "sum") -> Any:
        """Combine the values of this rank and of all ranks before it.

        Parameters, result and errors are those of `allreduce`.
        """
        leaf_arrays = self._prepared(value, op)
        rank_arrays = self._gathered(f'scan("{op}")', leaf_arrays)[: self.rank + 1]
        return self._like(value, self._combined(rank_arrays, op))

    def exscan(self, value: Any, op: str = "sum") -> Any:
        """Combine the values of all ranks before this one; None on rank 0.

        Parameters, result and errors are those of `allreduce`. The sum of the ranks' lengths is
        the position of a rank's first element in the whole array.
        """
        leaf_arrays = self._prepared(value, op)
        rank_arrays = self._gathered(f'exscan("{op}")', leaf_arrays)[: self.rank]
        return self._like(value, self._combined(rank_arrays, op)) if rank_arrays else None

    def _prepared(self, value: Any, op: Any) -> list[Array]:
        check_op(op)
        return [convert_for(self._numbers(leaf), op) for leaf in leaves(value)]

    def _combined(self, rank_arrays: Sequence[Sequence[Array]], op: str) -> list[Any]:
        return [combine_arrays(leaf_arrays, op) for leaf_arrays in zip(*rank_arrays, strict=True)]

    def nccl_id(self) -> bytes | tuple[int, ...]:
        """Return a new identifier for a communicator of NCCL, the same on all ranks.

        For example ``nccl.NcclCommunicator(ctx.size, ctx.nccl_id(), ctx.rank)`` after ``from
        cupy.cuda import nccl``. The function must destroy that communicator before it returns. All
        ranks must call this.

        Returns
        -------
        bytes or tuple of int
            The identifier, as `cupy.cuda.nccl.get_unique_id` returns it on rank 0: bytes from CuPy
            14 on.

        Raises
        ------
        ConfigError
            If rank 0 has no CuPy, or one without NCCL.
        SectionError
            If the ranks made different calls.
        """
        message = None
        if self.rank == 0:
            message = np.array([isinstance(nccl_id := _new_nccl_id(), bytes), *nccl_id], np.int64)
        is_bytes, *values = self.bcast(message).tolist()
        return bytes(values) if is_bytes else tuple(values)

    def _group(self, ranks: list[int], name: str) -> Communicator:
        connections = GroupConnections(self._connections, ranks, name)
        at, size = connections.rank_and_size
        group = Communicator(at, size, connections, self.device, name)
        group.reads_memory = self.reads_memory
        group.reduces_by_messages = self.device.backend.on_device
        if not group.reduces_by_messages:
            options = connections, self.reads_memory, self.device
            group._partitions = Partitions(RankGrid.in_line(size), at, *options)
        return group


def _new_nccl_id() -> Any:
    try:
        from cupy.cuda import nccl

        if nccl.available:
            return nccl.get_unique_id()
    except ImportError:
        pass
    raise MissingPackageError(
        "nccl_id: expected CuPy with NCCL on the worker of rank 0, got none. Install CuPy there, "
        "for example by pip install cupy-cuda13x, and nvidia-nccl-cu13 for NCCL.",
        name="cupy",
    )
