"""A rank enqueues its program once, while its stream is captured.

During the capture, the ranks send each other the descriptors of their arrays. A rank that fails
sends and receives an empty message in place of each later one. So others fail too, and no rank
waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dask_p2p.fusing.planning.program import Superstep
from dask_p2p.fusing.running.messages import Messages, Packing, text_of
from dask_p2p.fusing.running.ready_program import ReadyProgram
from dask_p2p.fusing.running.runner import ProgramContext, Runner
from dask_p2p.sections.exchange.device import HOST
from dask_p2p.sections.exchange.lending import HostLending
from dask_p2p.sections.gang.progress import Progress
from dask_p2p.sections.gpu.graph_lending import GraphLending
from dask_p2p.types import Key


class GraphRunner(Runner):
    """Runs a program with the same exchanges on all ranks.

    Parameters
    ----------
    ctx, ready
        As for `Runner`.
    lending
        The memory of arrays that other ranks read.
    exchanging
        The supersteps with an exchange of any rank.
    """

    def __init__(
        self,
        ctx: ProgramContext,
        ready: ReadyProgram,
        lending: GraphLending,
        exchanging: frozenset[int],
    ) -> None:
        super().__init__(ctx, ready, (HostLending(ctx.connections), lending))
        self._progress = Progress()  # that of the rank counts calls
        self._device = HOST  # nothing is waited for
        self._lending, self._exchanging = lending, exchanging
        self._messages = self._own = _GraphMessages(ctx.connections, self._assembling)

    def run(self, blocks: Sequence[Any]) -> list[list[Any]]:
        found = super().run(blocks)
        self._lending.put_barrier()
        return found

    def skip(self) -> None:
        """Send and receive an empty message in place of each one that is left."""
        self._own.skip(self._program.supersteps)


class _GraphMessages(Messages):
    """Messages with descriptors, which end together on all ranks."""

    _next = 0  # superstep of the next message

    def exchange(self, number: int, superstep: Superstep, values: Any) -> None:
        self._next = number + 1
        super().exchange(number, superstep, values)

    def _sends(
        self, packed: Mapping[int, Packing], superstep: Superstep, values: Mapping[Key, Any]
    ) -> dict[int, bytearray]:
        try:
            return super()._sends(packed, superstep, values)
        except Exception:
            self._send_nothing(self._next - 1, superstep)
            raise

    def skip(self, supersteps: Sequence[Superstep]) -> None:
        """Send and receive an empty message in place of each one that is left."""
        for number in range(self._next, len(supersteps)):
            if supersteps[number].sends or supersteps[number].receives:
                self._send_nothing(number, supersteps[number])

    def _send_nothing(self, number: int, superstep: Superstep) -> None:
        sends = dict.fromkeys(superstep.sends, b"")
        self._connections.exchange(text_of(number), sends, dict.fromkeys(superstep.receives))
