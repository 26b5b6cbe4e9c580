"""Communicators: some ranks of a section, with messages and collective operations of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_p2p.inputs import nearest_name
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.context.collectives import (
    UFUNCS,
    Collectives,
    check_op,
    new_nccl_id,
    text_of_kind,
)
from dask_p2p.sections.context.messages import (
    Transfer,
    check_parts,
    checked_rank,
    checked_root,
    checked_tag,
)
from dask_p2p.sections.exchange.redistribution import Partitions
from dask_p2p.sections.exchange.values import is_stackable, leaves, with_leaves
from dask_p2p.sections.wire.connections import GroupConnections
from dask_p2p.sections.wire.frames import CALL_TAGS
from dask_p2p.types import Array

#: Names of mpi4py that are others here, not in lower case alone.
_OF_MPI = {
    "Get_rank": "rank",
    "Get_size": "size",
    "Allgatherv": "allgather(value, ragged=True)",
    "Gatherv": "gather(value, ragged=True)",
    "Scatterv": "scatter",
    "Alltoallv": "alltoall",
    "Alltoallw": "alltoall",
    "Ibcast": "bcast",
    "Ssend": "send",
    "Sendrecv_replace": "sendrecv",
    "Cart_create": "grid, the ranks along each axis",
    "Get_coords": "box, the position of the local block",
    "Get_topo": "grid",
    "Shift": "along(axis), whose neighbours are rank - 1 and rank + 1",
    "Sub": "along(axis)",
    "Split": "along(axis)",
    "split": "along(axis)",
    "Split_type": "along(axis)",
}
#: Methods that the package calls, not users.
_OF_LOOPS = "close_stores", "flush_stores", "halo_exchange", "restore_state", "step_for"


class Communicator(Collectives):
    """Some of the ranks of a section, from `Context.along`, as a communicator of MPI.

    It has the methods of `Context` that exchange values, from `send` to `allreduce`. All of its
    ranks must call the same methods in the same order.

    Attributes
    ----------
    rank, size : int
        This rank in the communicator, and the number of its ranks.
    """

    def send(self, value: Any, dest: int | None, tag: int = 0) -> None:
        """Send a value to another rank, which receives it by `recv`.

        The call returns when `value` may change: it may wait until the other rank receives a large
        value. Two ranks that send to each other at the same time do not wait for each other.

        Parameters
        ----------
        value : object
            Any object that can be pickled. Numbers, arrays, and tuples and dicts of these are sent
            without a pickle.
        dest : int or None
            The rank that receives the value. None sends nothing: beyond the end of a line of ranks.
        tag : int, optional
            A number that `recv` has to give as well. By default 0.

        Raises
        ------
        InputError
            If there is no such rank, or `value` cannot be pickled, or `tag` is no tag.
        SectionError
            If the ranks made different calls.
        """
        self._send(value, checked_rank("dest", dest, self.size), checked_tag(tag)).wait()

    def isend(self, value: Any, dest: int | None, tag: int = 0) -> Transfer:
        """Begin to send a value, without waiting. Parameters and errors are those of `send`.

        Returns
        -------
        Transfer
            The value may change after its ``wait()``.
        """
        return self._send(value, checked_rank("dest", dest, self.size), checked_tag(tag))

    def recv(self, source: int | None, tag: int = 0, *, out: Array | None = None) -> Any:
        """Receive the next value that another rank has sent to this one.

        Messages of one rank arrive in the order of its sends.

        Parameters
        ----------
        source : int or None
            The rank that sends the value. None receives nothing, and returns None.
        tag : int, optional
            The tag of the message. It is compared: a rank cannot receive messages in another order.
        out : array, optional
            Memory for the value, an array of its shape and dtype. By default a new array.

        Returns
        -------
        object
            The value, owned by the caller, of the type that was sent: `out` if that is given.

        Raises
        ------
        InputError
            If there is no such rank, or `out` has another shape or dtype than the value.
        SectionError
            If the next message has another tag, or the other rank makes a call of all ranks, or
            has returned.
        """
        return self._receive_next(checked_rank("source", source, self.size), checked_tag(tag), out)

    def irecv(self, source: int | None, tag: int = 0, *, out: Array | None = None) -> Transfer:
        """Begin to receive a value, without waiting. Parameters and errors are those of `recv`.

        Returns
        -------
        Transfer
            Its ``wait()`` returns the value.
        """
        return self._receive(checked_rank("source", source, self.size), checked_tag(tag), out)

    def sendrecv(
        self,
        value: Any,
        dest: int | None,
        source: int | None,
        tag: int = 0,
        *,
        out: Array | None = None,
    ) -> Any:
        """Send a value to one rank, and receive one from the same or another rank.

        Parameters and errors are those of `send` and `recv`.

        Returns
        -------
        object
            The received value; None if `source` is None.
        """
        to = checked_rank("dest", dest, self.size)
        source_rank = checked_rank("source", source, self.size)
        sent = self._send(value, to, checked_tag(tag))
        received = self._receive_next(source_rank, checked_tag(tag), out)
        sent.wait()
        return received

    def alltoall(self, parts: Sequence[Any]) -> list[Any]:
        """Send a value to each rank, and receive one from each.

        Parameters
        ----------
        parts : sequence
            A value for each rank, in order of rank, as for `send`: arrays may have any length.

        Returns
        -------
        list
            The values that the ranks sent to this one, in order of rank.

        Raises
        ------
        InputError
            If `parts` has another length than `size`, or a value cannot be pickled.
        SectionError
            If the ranks made different calls.
        """
        check_parts(parts, self.size)
        return self._exchange(dict(enumerate(parts)), CALL_TAGS["alltoall()"])

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
            return self._exchange(dict.fromkeys(range(self.size), value), tag)
        return self._stacked(value, self._gather_all("allgather()", self._leaf_arrays(value)))

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
        root = checked_root(root, self.size)
        if not ragged and is_stackable(value, self.device):
            call = f"gather(root={root})"
            return self._stacked(value, self._gather_at(root, call, self._leaf_arrays(value)))
        tag = CALL_TAGS["gather(ragged=True)" if ragged else "gather() of an object"]
        sent = self._send(value, root, tag)
        received = None
        if self.rank == root:
            received = [self._receive_next(rank, tag) for rank in range(self.size)]
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
        root = checked_root(root, self.size)
        if self.rank == root:
            check_parts(parts, self.size)
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
        return self._from_root(
            checked_root(root, self.size), [value] * self.size, CALL_TAGS["bcast()"]
        )

    def _from_root(self, root: int, parts: Sequence[Any], tag: int) -> Any:
        """Return the value that one rank has for this one; `parts` count on that rank."""
        values = parts if self.rank == root else ()
        sent = [self._send(part, rank, tag) for rank, part in enumerate(values)]
        received = self._receive_next(root, tag)
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
        root = checked_root(root, self.size)
        numbers = np.array(self._numbers(value))
        receivers = [rank for rank in range(self.size) if rank != self.rank]
        call = f"broadcast(root={root}) of {text_of_kind(numbers.dtype, numbers.shape)}"
        if self.rank == root:
            self._connections.exchange(call, dict.fromkeys(receivers, numbers.tobytes()), {})
        else:
            received = self._connections.exchange(call, {}, {root: bytearray(numbers.nbytes)})
            numbers = np.frombuffer(received[root], numbers.dtype).reshape(numbers.shape)
        return self.device.from_host(numbers[()], value)

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
        rank_arrays = self._gather_all(f'allreduce("{op}")', self._prepared(value, op))
        return self._combined(value, rank_arrays, op)

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
        root, leaf_arrays = checked_root(root, self.size), self._prepared(value, op)
        rank_arrays = self._gather_at(root, f'reduce("{op}", root={root})', leaf_arrays)
        return self._combined(value, rank_arrays, op)

    def scan(self, value: Any, op: str = "sum") -> Any:
        """Combine the values of this rank and of all ranks before it.

        Parameters, result and errors are those of `allreduce`.
        """
        rank_arrays = self._gather_all(f'scan("{op}")', self._prepared(value, op))
        return self._combined(value, rank_arrays[: self.rank + 1], op)

    def exscan(self, value: Any, op: str = "sum") -> Any:
        """Combine the values of all ranks before this one; None on rank 0.

        Parameters, result and errors are those of `allreduce`. The sum of the ranks' lengths is
        the position of a rank's first element in the whole array.
        """
        rank_arrays = self._gather_all(f'exscan("{op}")', self._prepared(value, op))
        return self._combined(value, rank_arrays[: self.rank], op)

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
        message = new_nccl_id() if self.rank == 0 else None
        is_bytes, *values = self.bcast(message).tolist()
        return bytes(values) if is_bytes else tuple(values)

    def _group(self, ranks: list[int], name: str) -> Communicator:
        connections = GroupConnections(self._connections, ranks, name)
        rank, size = connections.rank_and_size
        reads_memory, partitions = self._reads_memory, None
        if not self.device.backend.on_device:
            in_line = RankGrid.in_line(size)
            partitions = Partitions(in_line, rank, connections, reads_memory, self.device)
        return Communicator(rank, size, connections, self.device, partitions, reads_memory, name)


def unknown_attribute(communicator: Communicator, name: str) -> str:
    """Return the text of the error for an attribute that a communicator lacks.

    A method `__getattr__` would need no other function, but Python then looks up all attributes of
    communicators three times as slowly.
    """
    attributes = (public for public in dir(type(communicator)) if public[0] != "_")
    names = [*(public for public in attributes if public not in _OF_LOOPS), "rank", "size"]
    remedy = _OF_MPI.get(name, name.lower())
    if remedy.partition("(")[0].partition(",")[0] not in [*names, "grid", "box"]:
        remedy = nearest_name(name, names)
    return f"expected an attribute of the context, got {name!r}. Use ctx.{remedy}."
