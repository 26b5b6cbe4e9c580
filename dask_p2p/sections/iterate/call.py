"""One call of a function of `iterate`, at one position in the cycle of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dask_p2p.geometry import Box
from dask_p2p.sections.exchange.halo import HaloArray, HaloExchange, HaloPart
from dask_p2p.sections.iterate.phase import Phase
from dask_p2p.types import Array


@dataclass(frozen=True)
class CallArrays:
    """Arrays of one call of a function, for a box of the local block."""

    values: dict[str, Any]  # arguments of the user's function
    function: Callable[[], Any]  # the user's function with them
    outs: dict[str, Array]  # memory for new blocks, by field
    parts: dict[str, HaloPart]  # of the newest level of each changed field
    reads_scalars: bool  # whether an argument is a number, which changes from step to step


class Call:
    """A phase at one position in the cycle."""

    def __init__(
        self,
        phase: Phase,
        changed: list[str],  # names of the fields that it changes
        reads: frozenset[str],  # names of the fields whose halos are updated before
        halo_arrays: list[HaloArray],  # of these fields
        exchange: HaloExchange | None,  # updates them
    ) -> None:
        self.phase, self.changed, self.reads = phase, changed, reads
        self.halo_arrays, self.exchange = halo_arrays, exchange
        self.arrays: dict[Box, CallArrays] = {}

    @property
    def is_worth_hiding(self) -> bool:
        """True if the interior should be computed while halos are in flight."""
        return self.exchange is not None and self.exchange.is_worth_hiding
