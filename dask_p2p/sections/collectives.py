"""Values that all members of a gang give each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.sections.devices import Host, check_not_masked
from dask_p2p.sections.link import Buffer
from dask_p2p.sections.links import Links

_REDUCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


class Collectives:
    """One member among all, and what they do together with single values."""

    def __init__(
        self,
        rank: int,  # which member this is
        size: int,  # of how many
        links: Links | None,  # by which it exchanges; None if it is the only one
        device: Host,  # where arrays lie; values go through host memory
    ) -> None:
        self.rank, self.size, self._links, self.device = rank, size, links, device

    def barrier(self) -> None:
        """Wait until all members have come here."""
        self._gather("barrier()", b"")

    def allreduce(self, value: Any, op: str = "sum") -> Any:
        """Combine values of all members, element by element, in the order of their ranks.

        The result has the same bits on all members, and whenever the function runs again.

        Parameters
        ----------
        value : number or array
            Of one shape and one dtype on all members. It is not changed.
        op : {"sum", "prod", "min", "max"}
            How two values are combined.

        Returns
        -------
        number or array
            A NumPy scalar if `value` has no dimensions, also of CuPy; else an array of its kind.
            The dtype is that of NumPy's reductions: sums of truth values, and of small integers,
            are 64 bits long.

        Raises
        ------
        InputError
            If there is no such operation, `value` holds nothing that it combines, or is masked.
        SectionError
            If the members made different calls, or gave values of different shapes or dtypes.
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
            raise InputError(f"value: expected what {op!r} combines, got {own.dtype}.") from None
        own = own.astype(dtype, copy=False)
        given = self._gather(f"allreduce({op!r}) of {own.dtype.str} {own.shape}", own.tobytes())
        total, *others = (np.frombuffer(data, own.dtype).reshape(own.shape) for data in given)
        total = total.copy()
        for other in others:
            combine(total, other, out=total)
        return self.device.from_host(total[()], value)

    def allgather(self, value: Any) -> Any:
        """Return the values of all members, by rank.

        Parameters
        ----------
        value : number or array
            Of one shape and one dtype on all members.

        Returns
        -------
        numpy.ndarray or cupy.ndarray
            With one dimension more than `value`, in front.

        Raises
        ------
        InputError
            If `value` holds no numbers, or is masked.
        SectionError
            As `allreduce` raises it.
        """
        own = self._numbers(value)
        given = self._gather(f"allgather() of {own.dtype.str} {own.shape}", own.tobytes())
        found = np.frombuffer(b"".join(given), own.dtype).reshape(self.size, *own.shape).copy()
        return self.device.from_host(found, value)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return one member's value.

        Parameters
        ----------
        value : number or array
            Of one shape and one dtype on all members; only that of `root` counts.
        root : int
            Whose value it is.

        Returns
        -------
        number or array
            A NumPy scalar if `value` has no dimensions.

        Raises
        ------
        InputError
            If there is no such member, `value` holds no numbers, or is masked.
        SectionError
            As `allreduce` raises it.
        """
        if root not in range(self.size):
            raise InputError(
                f"root: expected a rank below {self.size}, got {root!r}. Give the ctx.rank of the "
                f"member whose value it is, such as 0."
            )
        own = np.array(self._numbers(value))
        others = [rank for rank in range(self.size) if rank != self.rank]
        call = f"broadcast(root={root}) of {own.dtype.str} {own.shape}"
        if self.rank == root:
            data = own.tobytes()
            self._exchange(call, dict.fromkeys(others, data), {})
        else:
            found = self._exchange(call, {}, {root: bytearray(own.nbytes)})
            own = np.frombuffer(found[root], own.dtype).reshape(own.shape)
        return self.device.from_host(own[()], value)

    def _numbers(self, value: Any) -> Any:
        check_not_masked("value", value)
        own = np.asarray(self.device.to_host(value))
        if own.dtype.kind not in "biufcmM":
            raise InputError(f"value: expected numbers, got {type(value).__name__}.")
        return own

    def _gather(self, call: str, data: bytes) -> list[Buffer]:
        """Give each member what each gives, by rank."""
        return [data] if self._links is None else self._links.gather(call, data)

    def _exchange(
        self, call: str, sends: Mapping[int, Buffer], receives: Mapping[int, Buffer | None]
    ) -> dict[int, memoryview]:
        return {} if self._links is None else self._links.exchange(call, sends, receives)
