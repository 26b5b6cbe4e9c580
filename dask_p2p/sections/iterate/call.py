"""One call of a function of `iterate`, at one position in the cycle of steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dask_p2p.errors import BlockMismatchError
from dask_p2p.geometry import Box
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.halo import HaloArray, HaloExchange, HaloPart
from dask_p2p.sections.iterate.local_fields import LocalField
from dask_p2p.sections.iterate.phase import Phase, Returned, explained_writes, replace_block
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
        device: Host,  # of the fields
    ) -> None:
        self.phase, self.changed, self.reads = phase, changed, reads
        self.halo_arrays, self.exchange, self._device = halo_arrays, exchange, device
        self.arrays: dict[Box, CallArrays] = {}

    def arrays_for(
        self,
        box: Box,
        values: dict[str, Any],  # arguments of the function
        fields: Mapping[str, LocalField],
        scalars: Collection[str],  # names of the numbers
    ) -> CallArrays:
        """Return the arrays for a box of the local block."""
        parts = {name: fields[name].parts(box)[0] for name in self.changed}
        outs = {name: fields[name].spare.inner[part.where] for name, part in parts.items()}
        reads_scalars = not self.phase.binding.names.isdisjoint(scalars)
        return CallArrays(values, self.phase.bound(values, outs), outs, parts, reads_scalars)

    def apply(self, box: Box, scalars: Mapping[str, Any]) -> Returned:
        """Fill a box of the next local blocks; return the other values of the function."""
        phase, arrays = self.phase, self.arrays[box]
        function = arrays.function
        if arrays.reads_scalars:
            function = phase.bound({**arrays.values, **scalars}, arrays.outs)
        with explained_writes():
            value = function()
        if phase.fills_out:
            return phase.filled(value, arrays.outs)
        returned = phase.returned(value)
        if returned.blocks.keys() != arrays.outs.keys():
            raise BlockMismatchError(
                f"expected new blocks of the same fields in each step, {self.changed}, got "
                f"{[*returned.blocks]}. Return the same names each time."
            )
        for name, new in returned.blocks.items():
            replace_block(self._device, arrays.outs[name], new, arrays.parts[name])
        return returned._replace(blocks={})  # perhaps views of fields

    @property
    def is_worth_hiding(self) -> bool:
        """True if the interior should be computed while halos are in flight."""
        return self.exchange is not None and self.exchange.is_worth_hiding

    @property
    def is_worth_hiding_in_graph(self) -> bool:
        """The same for captured steps."""
        return self.exchange is not None and self.exchange.is_worth_hiding_in_graph
