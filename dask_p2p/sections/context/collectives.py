"""Collective operations that bring values of some ranks to others, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_p2p.backends.plain import check_plain
from dask_p2p.errors import InputError
from dask_p2p.inputs import as_integer
from dask_p2p.sections.context.messages import Messaging
from dask_p2p.sections.exchange.values import (
    NUMBER_KINDS,
    arrays_in,
    as_numbers,
    is_stackable,
    leaves,
    text_of_arrays,
    text_of_kind,
    with_leaves,
)
from dask_p2p.sections.wire.messages.format import CALL_TAGS
from dask_p2p.types import Array


class Collectives(Messaging):
    """One rank, and the values that all ranks pass to each other."""

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
        return self._like(value, self._stacked(self._gathered("allgather()", self._own(value))))

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
            given = self._at_root(self._own(value), f"gather(root={root})", root)
            return None if given is None else self._like(value, self._stacked(given))
        tag = CALL_TAGS["gather(ragged=True)" if ragged else "gather() of an object"]
        sent = self._sent(value, root, tag)
        found = None
        if self.rank == root:
            found = [self._next(rank, tag) for rank in range(self.size)]
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
        given = parts if self.rank == root else ()
        sent = [self._sent(part, rank, tag) for rank, part in enumerate(given)]
        found = self._next(root, tag)
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
        call = f"broadcast(root={root}) of {text_of_kind(own.dtype, own.shape)}"
        if self.rank == root:
            data = own.tobytes()
            self._connections.exchange(call, dict.fromkeys(others, data), {})
        else:
            found = self._connections.exchange(call, {}, {root: bytearray(own.nbytes)})
            own = np.frombuffer(found[root], own.dtype).reshape(own.shape)
        return self.device.from_host(own[()], value)

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
        own = as_numbers(self.device.to_host(value))
        if own.dtype.kind not in NUMBER_KINDS:
            found = getattr(value, "dtype", type(value).__name__)
            raise InputError(f"value: expected numbers, got {found}. Convert it to numbers first.")
        return own

    def _own(self, value: Any) -> list[Array]:
        return [self._numbers(leaf) for leaf in leaves(value)]

    def _like(self, value: Any, found: Sequence[Any]) -> Any:
        """Return a value with the structure and the kinds of arrays of another one."""
        from_host = self.device.from_host
        made = [
            tuple([from_host(part, like) for part in each])
            if isinstance(each, tuple)
            else from_host(each, like)
            for like, each in zip(leaves(value), found, strict=True)
        ]
        return with_leaves(value, made)

    def _stacked(self, given: Sequence[Sequence[Array]]) -> list[Array]:
        return [np.stack(each) for each in zip(*given, strict=True)]

    def _gathered(self, call: str, own: Sequence[Array]) -> list[Sequence[Array]]:
        """Return the arrays of all ranks, by rank: those of this rank itself, read-only others."""
        data, text = b"".join([each.tobytes() for each in own]), text_of_arrays(call, own)
        found = enumerate(self._connections.gather(text, data))
        return [own if rank == self.rank else arrays_in(each, own) for rank, each in found]

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
