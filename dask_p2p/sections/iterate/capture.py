"""Steps of an iteration as a CUDA graph, which is verified before it is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Literal

import numpy as np

from dask_p2p import tuning
from dask_p2p.errors import InputError
from dask_p2p.geometry import Box, box_size
from dask_p2p.sections.comparison import is_close
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.halo import HaloArray
from dask_p2p.sections.gpu.device import Gpu, can_wait_for_peers, captured, own_gpu, share_gpus
from dask_p2p.sections.iterate.functions import is_replayable
from dask_p2p.sections.iterate.iteration import Iteration
from dask_p2p.sections.iterate.step import Call
from dask_p2p.sections.wire.connection import AttemptEndedError


class Captured:
    """Steps that are replayed as a CUDA graph, without calls of their function.

    A graph misses all work that the function does outside its stream, and every change of a value
    other than its arguments. So `rehearse` runs the graph once on the current fields, and restores
    them. The function then does the same steps, and `difference` compares both results.
    """

    def __init__(
        self,
        device: Gpu,
        fields: Sequence[HaloArray],  # the current ones
        steps: Callable[[], None],  # enqueues steps that end with each field where it was
    ) -> None:
        self._device, self._fields = device, fields
        self._replay = captured(device, steps)
        # Before other ranks wait for this one: there may be no memory.
        self._before = [field.data.copy() for field in fields]
        self._graph_results = [field.inner.copy() for field in fields]

    def rehearse(self) -> None:
        """Run the graph once, keep its results, and restore the fields: a call of all ranks."""
        for field, before in zip(self._fields, self._before, strict=True):
            before[...] = field.data
        self._replay()
        for field, result in zip(self._fields, self._graph_results, strict=True):
            result[...] = field.inner
        for field, before in zip(self._fields, self._before, strict=True):
            field.data[...] = before
        self._before = []

    def __call__(self) -> None:
        self._replay()

    def difference(self) -> str:
        """Return a text if the function's results of the same steps differ; "" if they do not."""
        fields, results = self._fields, self._graph_results
        self._fields = self._graph_results = []
        for field, result in zip(fields, results, strict=True):
            is_same = result.view(np.uint8) == field.inner.copy().view(np.uint8)
            same = int(self._device.module.count_nonzero(is_same))
            if same < result.nbytes:
                return f"{result.nbytes - same} of {result.nbytes} bytes"
        return ""


class Replays:
    """The captured steps of one rank.

    With ``capture=True`` the user promises that the function does the same in each step. With
    "auto" the code of the function has to show it, and steps that cannot be captured go on one by
    one.
    """

    def __init__(self, iteration: Iteration, ctx: Context) -> None:
        self._iteration, self._ctx = iteration, ctx
        self._is_promised = iteration.capture is True

    def is_worthwhile(self, step: int) -> bool:
        """Return whether the steps after this one may be captured. The same on all ranks."""
        if self._iteration.capture != "auto":
            return self._is_promised
        is_long = self._iteration.steps - step >= tuning.current.capture_steps
        return is_long and isinstance(self._ctx.device, Gpu) and self._is_replayable

    def capture(
        self,
        calls: Collection[Call],
        levels: Sequence[HaloArray],  # of all fields
        steps: Callable[[], None],  # enqueues a cycle of steps
        restore: Callable[[], None],  # restores the fields after an incomplete cycle
    ) -> Captured | None:
        """Return a graph that replays a cycle of steps; None if a rank cannot capture it.

        Raises `InputError` if ``capture=True``, and the steps cannot be captured.
        """
        device = self._ctx.device
        if not self._all(self._can_begin(calls, levels)) or not isinstance(device, Gpu):
            return None
        if not self._is_promised and self._share_gpus():
            return None
        graph: Captured | None = None
        exchanges = [call.exchange for call in calls if call.exchange is not None]
        counts = [exchange.mover.count for exchange in exchanges]
        try:
            graph = Captured(device, levels, steps)
        except AttemptEndedError:
            raise
        except Exception:
            if self._is_promised:
                raise
            restore()
            for exchange, count in zip(exchanges, counts, strict=True):
                exchange.mover.count = count
        if not self._is_promised and not self._all(graph is not None):
            return None
        assert graph is not None
        graph.rehearse()
        return graph

    def is_right(self, graph: Captured) -> bool:
        """Return whether the graph and the functions have made the same values on all ranks.

        Raises `InputError` if ``capture=True``, and they differ.
        """
        difference = graph.difference()
        if difference and self._is_promised:
            raise InputError(
                f"capture: expected a function that does the same in each step, all of it on "
                f"the current stream, got one whose captured steps differ from its own in "
                f"{difference}. Leave out capture=True, or remove step counters, random numbers "
                f"and other streams from the function."
            )
        return self._is_promised or self._all(not difference)

    def _can_begin(self, calls: Collection[Call], levels: Sequence[HaloArray]) -> bool:
        """Return whether this rank can capture steps; with "auto" also whether they are short."""
        can = [call.exchange.mover.can_enqueue() for call in calls if call.exchange is not None]
        is_possible = isinstance(self._ctx.device, Gpu) and can_wait_for_peers()
        if not is_possible or not all(can):
            return False
        if self._is_promised:
            return True
        has_functions = any(level.layout.ends is not None for level in levels)
        size_bytes = sum(int(level.data.nbytes) for level in levels)
        return not has_functions and size_bytes < tuning.current.captured_bytes

    @cached_property
    def _is_replayable(self) -> bool:
        """True if the code of the iteration shows that all steps do the same."""
        iteration = self._iteration
        if iteration.overlap is True or iteration.scalars or not iteration.has_constant_arguments:
            return False
        return all(
            not phase.binding.reads_at and is_replayable(phase.function)
            for phase in iteration.phases
        )

    def _share_gpus(self) -> bool:
        gpus = self._ctx.allgather(np.frombuffer(own_gpu(), np.uint8))
        return share_gpus([gpu.tobytes() for gpu in gpus])

    def _all(self, condition: bool) -> bool:
        return bool(self._ctx.allreduce(np.array(condition), "min"))


# Functions that compute parts of a local block as they compute the whole block.
#
# With overlap, a function is called for the interior while its halos are in flight, and then for
# parts of the boundary. A function that keeps a state, or reads sizes or sums of its block, would
# return other values than for the whole block. So before calls overlap, one call compares the
# results of both.


class Overlap:
    """The calls of one rank that overlap.

    With ``overlap=True`` the user promises that the function computes parts of a block alike. With
    "auto" its code has to show that another call changes nothing, and results have the same bits.
    """

    def __init__(
        self,
        iteration: Iteration,
        device: Host,
        block_box: Box,  # the whole local block
    ) -> None:
        self._iteration, self._device, self._block_box = iteration, device, block_box
        self._is_promised = iteration.overlap is True
        self._is_possible = bool(iteration.overlap) and not iteration.is_staggered
        #: By id of the phase: whether its code is plain, and whether parts are computed alike.
        self._plain: dict[int, bool] = {}
        self._computes_alike: dict[int, bool] = {}

    def is_wanted(self, call: Call) -> bool:
        """Return whether a call overlaps, as far as its function is known."""
        exchange = call.exchange
        if not self._is_possible or exchange is None or not exchange.has_parts:
            return False
        if self._is_promised:
            return True
        if self._iteration.capture is True or not exchange.is_worth_hiding:
            return False
        is_alike = self._computes_alike.get(id(call.phase))
        return self._is_plain(call) if is_alike is None else is_alike

    def is_due(self, call: Call) -> bool:
        """Return whether a call may overlap in a graph, and has yet to be compared."""
        exchange, is_known = call.exchange, id(call.phase) in self._computes_alike
        if not self._is_possible or is_known or exchange is None or not exchange.has_parts:
            return False
        return exchange.is_worth_hiding_in_graph and self._is_plain(call)

    def is_checked(self, call: Call) -> bool:
        """Return whether a function is known to compute parts alike."""
        return self._computes_alike.get(id(call.phase), False)

    def enqueue(self, call: Call) -> None:
        """Enqueue a call and its exchange in a graph, concurrently if they may overlap."""
        exchange, block_box = call.exchange, self._block_box
        if exchange is None:
            call.apply(block_box)
        elif not (exchange.is_worth_hiding_in_graph and self.is_checked(call)):
            exchange.enqueue(call.halo_arrays)
            call.apply(block_box)
        else:
            interior, *boundary_parts = exchange.boxes
            exchange.enqueue(call.halo_arrays, partial(call.apply, interior))
            for box in boundary_parts:
                call.apply(box)

    def check(self, call: Call) -> None:
        """Compare the results for the whole block, which are there, with those for its parts.

        Raises `InputError` if they differ, with ``overlap=True``.
        """
        assert call.exchange is not None, "calls without halos do not overlap"
        parts = [*filter(box_size, call.exchange.boxes)]
        outcome = self._compare(call, parts)
        if self._is_promised and outcome == "other":
            raise InputError(
                "overlap=True: expected a function that computes parts of a block as it computes "
                "the whole block, got one with other values for parts. Leave out overlap=True, or "
                "remove counters, random numbers and sums over the block."
            )
        self._computes_alike[id(call.phase)] = outcome == "same" or self._is_promised

    def _compare(self, call: Call, parts: Sequence[Box]) -> Literal["same", "close", "other"]:
        """Compute parts of the block, whose whole results are there, and compare both.

        "same": all bits are equal; "close": values differ by rounding errors. The results for the
        whole block are there afterwards.
        """
        before = self._sums(call)
        for box in parts:
            call.apply(box)
        if self._sums(call) == before:
            return "same"
        part_results = [field.next_level.inner.copy() for field in call.changed_fields]
        call.apply(self._block_box)
        module = self._device.module
        results = (field.next_level.inner for field in call.changed_fields)
        pairs = zip(part_results, results, strict=True)
        return "close" if all(is_close(module, *pair) for pair in pairs) else "other"

    def _is_plain(self, call: Call) -> bool:
        phase = call.phase
        if id(phase) not in self._plain:  # to find out takes as long as a step
            is_plain = self._iteration.has_constant_arguments and is_replayable(phase.function)
            self._plain[id(phase)] = is_plain
        return self._plain[id(phase)]

    def _sums(self, call: Call) -> list[int]:
        return [self._device.checksum(field.next_level.data) for field in call.changed_fields]
