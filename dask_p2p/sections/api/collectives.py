"""Collective operations of a gang on single values."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.sections.api.messages import Messaging
from dask_p2p.sections.exchange.device import check_not_masked

_REDUCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


class Collectives(Messaging):
    """One rank, and its collective operations on single values."""

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
        value : number or array
            A value of the same shape and dtype on all ranks. It is not changed.
        op : {"sum", "prod", "min", "max"}, optional
            The operation that combines two values.

        Returns
        -------
        number or array
            A NumPy scalar if `value` has no dimensions, even for CuPy; else an array of its kind.
            The dtype is that of NumPy's reductions: sums of booleans and of small integers have
            64 bits.

        Raises
        ------
        InputError
            If `op` is unknown or cannot combine the dtype of `value`, or if `value` is masked.
        SectionError
            If the ranks made different calls, or passed values of different shapes or dtypes.
        """
        if not isinstance(op, str) or op not in _REDUCTIONS:
            raise InputError(
                f"op: expected one of {', '.join(_REDUCTIONS)}, got {op!r}. Give one of these, or "
                f"combine the values that ctx.allgather(value) returns."
            )
        own, combine = self._numbers(value), _REDUCTIONS[op]
        try:
            dtype = combine.reduce(np.ones(1, own.dtype)).dtype
        except TypeError:
            raise InputError(
                f"value: expected a dtype that {op!r} combines, got {own.dtype}."
            ) from None
        own = own.astype(dtype, copy=False)
        call = f"allreduce({op!r}) of {own.dtype.str} {own.shape}"
        given = self._connections.gather(call, own.tobytes())
        total, *others = (np.frombuffer(data, own.dtype).reshape(own.shape) for data in given)
        total = total.copy()
        for other in others:
            combine(total, other, out=total)
        return self.device.from_host(total[()], value)

    def allgather(self, value: Any) -> Any:
        """Return the values of all ranks, in rank order.

        Parameters
        ----------
        value : number or array
            A value of the same shape and dtype on all ranks.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            An array with one additional dimension, the first, which is indexed by rank.

        Raises
        ------
        InputError
            If `value` holds no numbers, or is masked.
        SectionError
            As for `allreduce`.
        """
        own = self._numbers(value)
        call = f"allgather() of {own.dtype.str} {own.shape}"
        given = self._connections.gather(call, own.tobytes())
        found = np.frombuffer(b"".join(given), own.dtype).reshape(self.size, *own.shape).copy()
        return self.device.from_host(found, value)

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
            If there is no such rank, or `value` holds no numbers or is masked.
        SectionError
            As for `allreduce`.
        """
        if root not in range(self.size):
            raise InputError(
                f"root: expected a rank below {self.size}, got {root!r}. Give the ctx.rank that "
                f"sends its value, such as 0."
            )
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

    def _numbers(self, value: Any) -> Any:
        check_not_masked("value", value)
        own = np.asarray(self.device.to_host(value))
        if own.dtype.kind not in "biufcmM":
            raise InputError(f"value: expected numbers, got {type(value).__name__}.")
        return own
