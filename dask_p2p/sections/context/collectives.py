"""Collective operations of a gang on single values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.plain import check_plain, is_plain
from dask_p2p.errors import InputError
from dask_p2p.sections.context.messages import Messaging
from dask_p2p.sections.context.reductions import check_op, combined, is_elementwise, prepared
from dask_p2p.sections.exchange.reduced import reduced_in_parts
from dask_p2p.sections.exchange.repartition import Redistribution
from dask_p2p.sections.exchange.values import arrays_in, leaves, text_of_arrays, with_leaves
from dask_p2p.sections.wire.messages.format import CALL_TAGS
from dask_p2p.types import Array


class Collectives(Messaging):
    """One rank, and its collective operations on single values."""

    _redistribution: Redistribution

    @cached_property
    def reduces_by_messages(self) -> bool:
        """True on GPUs of one host: a message takes one round of hosts, regions take two."""
        others = map(self._connections.is_on_other_host, range(self.size))
        return self.device.backend.on_device and not any(others)

    def barrier(self) -> None:
        """Wait until all ranks have called this method.

        Raises
        ------
        SectionError
            If the ranks made different calls.
        """
        self._connections.gather("barrier()", b"")

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
        if is_elementwise(op) and any(map(self._is_in_parts, of_value)):
            return with_leaves(value, [self._reduced(leaf, op) for leaf in of_value])
        own = self._prepared(value, op)
        return self._like(value, self._combined(self._gathered("allreduce", own, op), op))

    def _is_in_parts(self, leaf: Any) -> bool:
        """Return whether an array is so large that each rank reduces one part."""
        is_here = isinstance(leaf, self.device.module.ndarray) and is_plain(leaf)
        return is_here and self.size > 1 and leaf.nbytes >= tuning.current.parted_reduction_bytes

    def _reduced(self, leaf: Any, op: str) -> Any:
        if not self._is_in_parts(leaf):
            return self.allreduce(leaf, op)
        dtype = prepared(np.empty(0, leaf.dtype), op).dtype
        own = leaf.astype(dtype, copy=False)
        if self.reduces_by_messages:
            return self._reduced_by_messages(own, op)
        return reduced_in_parts(own, op, combined, self.size, self._redistribution)

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
        given = self._at_root(own, f"reduce({op!r}, root={self._checked_root(root)})", root)
        return None if given is None else self._like(value, self._combined(given, op))

    def scan(self, value: Any, op: str = "sum") -> Any:
        """Combine the values of this rank and of all ranks before it.

        Parameters, result and errors are those of `allreduce`.
        """
        own = self._prepared(value, op)
        given = self._gathered("scan", own, op)[: self.rank + 1]
        return self._like(value, self._combined(given, op))

    def exscan(self, value: Any, op: str = "sum") -> Any:
        """Combine the values of all ranks before this one; None on rank 0.

        Parameters, result and errors are those of `allreduce`. The sum of the ranks' lengths is
        the position of a rank's first element in the whole array.
        """
        own = self._prepared(value, op)
        given = self._gathered("exscan", own, op)[: self.rank]
        return self._like(value, self._combined(given, op)) if given else None

    def allgather(self, value: Any, ragged: bool = False) -> Any:
        """Return the values of all ranks, in rank order.

        Parameters
        ----------
        value : number, array, tuple or dict
            A value of the same shape and dtype on all ranks.
        ragged : bool, optional
            True if shapes and dtypes may differ.

        Returns
        -------
        numpy.ndarray or cupy.ndarray, tuple, dict or list
            An array with one additional dimension, the first, which is indexed by rank. For a tuple
            or dict one for each value. With `ragged` a list of the values.

        Raises
        ------
        InputError
            If `value` holds no numbers.
        SectionError
            If the ranks made different calls, or passed values of different shapes or dtypes.
        UnsupportedArrayError
            If `value` is masked.
        """
        if ragged:
            return self._exchanged([value] * self.size, CALL_TAGS["allgather(ragged=True)"])
        return self._like(value, self._stacked(self._gathered("allgather", self._own(value))))

    def gather(self, value: Any, root: int = 0, ragged: bool = False) -> Any:
        """Return the values of all ranks on one rank, and None on the others.

        Parameters
        ----------
        value : number, array, tuple or dict
            The value of this rank.
        root : int, optional
            The rank that gets the values. By default 0.
        ragged : bool, optional
            True if shapes and dtypes may differ.

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
        if not ragged:
            given = self._at_root(self._own(value), f"gather(root={root})", root)
            return None if given is None else self._like(value, self._stacked(given))
        tag = CALL_TAGS["gather(ragged=True)"]
        sent = self._sent(value, root, tag)
        found = None
        if self.rank == root:
            found = [self._received(rank, tag).wait() for rank in range(self.size)]
        sent.wait()
        return found

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
        number, array, tuple or dict
            The value for this rank.

        Raises
        ------
        InputError
            If there is no such rank, or `parts` has another length than `size` on the rank `root`,
            or a value holds anything but numbers.
        SectionError
            If the ranks made different calls.
        """
        root = self._checked_root(root)
        if self.rank == root:
            self._check_parts("parts", parts)
        return self._from_root(root, parts or (), CALL_TAGS["scatter()"])

    def bcast(self, value: Any = None, root: int = 0) -> Any:
        """Return the value of one rank. Only that rank needs to have it.

        Parameters
        ----------
        value : number, array, tuple or dict
            The value on the rank `root`. It does not count on the others.
        root : int, optional
            The rank that sends its value. By default 0.

        Returns
        -------
        number, array, tuple or dict
            A copy of the value, with the dtypes and shapes that it has on the rank `root`.

        Raises
        ------
        InputError
            If there is no such rank, or the value holds anything but numbers.
        SectionError
            If the ranks made different calls.
        UnsupportedArrayError
            If an array is masked.
        """
        return self._from_root(self._checked_root(root), [value] * self.size, CALL_TAGS["bcast()"])

    def _from_root(self, root: int, parts: Sequence[Any], tag: int) -> Any:
        """Return the value that one rank has for this one; `parts` count on that rank."""
        given = parts if self.rank == root else ()
        sent = [self._sent(part, rank, tag) for rank, part in enumerate(given)]
        found = self._received(root, tag).wait()
        for each in sent:
            each.wait()
        return found

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
        own = np.array(self._numbers(value))
        others = [rank for rank in range(self.size) if rank != self.rank]
        call = f"broadcast(root={root}) of {own.dtype.str} {own.shape}"
        if self.rank == root:
            data = own.tobytes()
            self._connections.exchange(call, dict.fromkeys(others, data), {})
        else:
            found = self._connections.exchange(call, {}, {root: bytearray(own.nbytes)})
            own = np.frombuffer(found[root], own.dtype).reshape(own.shape)
        return self.device.from_host(own[()], value)

    def _checked_root(self, root: Any) -> int:
        if isinstance(root, bool) or root not in range(self.size):
            raise InputError(
                f"root: expected a rank below {self.size}, got {root!r}. Give the ctx.rank that "
                f"sends or gets the value, such as 0."
            )
        return int(root)

    def _numbers(self, value: Any) -> Any:
        check_plain("value", value)
        try:
            own = np.asarray(self.device.to_host(value))
        except ValueError:  # a ragged list
            own = np.asarray(None)
        if own.dtype.kind not in "biufcmM":
            found = getattr(value, "dtype", type(value).__name__)
            raise InputError(f"value: expected numbers, got {found}. Convert it to numbers first.")
        return own

    def _own(self, value: Any) -> list[Array]:
        return [self._numbers(leaf) for leaf in leaves(value)]

    def _prepared(self, value: Any, op: Any) -> list[Array]:
        check_op(op)
        return [prepared(own, op) for own in self._own(value)]

    def _like(self, value: Any, found: Sequence[Any]) -> Any:
        """Return a value with the structure and the kinds of arrays of another one."""
        made = []
        for like, each in zip(leaves(value), found, strict=True):
            parts = each if isinstance(each, tuple) else (each,)
            own = tuple(self.device.from_host(part, like) for part in parts)
            made.append(own if isinstance(each, tuple) else own[0])
        return with_leaves(value, made)

    def _combined(self, given: Sequence[Sequence[Array]], op: str) -> list[Any]:
        return [combined(each, op) for each in zip(*given, strict=True)]

    def _stacked(self, given: Sequence[Sequence[Array]]) -> list[Array]:
        return [np.stack(each) for each in zip(*given, strict=True)]

    def _gathered(self, name: str, own: Sequence[Array], *args: Any) -> list[list[Array]]:
        """Return the arrays of all ranks, by rank."""
        data = b"".join([each.tobytes() for each in own])
        call = text_of_arrays(f"{name}({', '.join(map(repr, args))})", own)
        return [arrays_in(each, own) for each in self._connections.gather(call, data)]

    def _at_root(self, own: Sequence[Array], call: str, root: int) -> list[list[Array]] | None:
        """Return the arrays of all ranks, by rank, on the rank `root`; None on the others."""
        data, text = b"".join([each.tobytes() for each in own]), text_of_arrays(call, own)
        # Each rank also receives a header: ranks with different roots would wait for each other.
        if self.rank != root:
            self._connections.exchange(text, {root: data}, {root: bytearray()})
            return None
        others = [rank for rank in range(self.size) if rank != root]
        receives = {rank: bytearray(len(data)) for rank in others}
        found = self._connections.exchange(text, dict.fromkeys(others, b""), dict(receives))
        return [arrays_in(found.get(rank, data), own) for rank in range(self.size)]
