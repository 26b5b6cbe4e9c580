"""The work of one rank: it joins blocks, calls the function, and splits the results into blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from pickle import PickleBuffer
from typing import Any, ClassVar, NamedTuple

import cloudpickle  # Dask's functions would log an error for each object without a pickle
import numpy as np
from dask.utils import format_bytes
from distributed import warn

from dask_p2p.backends import as_array, backend_named, checked_block
from dask_p2p.engine.context import MemoryNeed, in_memory_bytes, where_is
from dask_p2p.engine.task import current_worker
from dask_p2p.errors import P2PWarning
from dask_p2p.geometry import Box, Index, box_size, box_slices
from dask_p2p.ops.estimate import MemoryEstimate
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.api.outputs import Outputs
from dask_p2p.sections.context.communicator import Communicator, unknown_attribute
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.exchange.device import HOST, Host, check_kind
from dask_p2p.types import Array, DType, Kind


class InputSpec(NamedTuple):
    """Dtype and decomposition of an input."""

    dtype: DType
    ranks: RankGrid  # of one rank if each has the whole array
    repeated: tuple[int, ...] = ()  # axes along which all ranks have its only element

    def blocks(self, rank: int) -> Iterator[tuple[Index, Box]]:
        """Yield index, and box in the local block, of each block of a rank that has elements."""
        blocks = self.ranks.blocks(rank % self.ranks.size, self.repeated)
        return ((index, box) for index, box in blocks if box_size(box))

    def shape(self, rank: int) -> tuple[int, ...]:
        lengths = enumerate(self.ranks.shape(rank % self.ranks.size))
        return tuple(1 if axis in self.repeated else n for axis, n in lengths)


class LocalBlocks:
    """A rank's local blocks of the arrays, not yet joined from Dask's blocks."""

    def __init__(
        self,
        rank: int,  # this rank
        arrays: Sequence[Sequence[Array]],  # by array: the Dask blocks of this rank
        inputs: Sequence[InputSpec],  # one for each array
        device: Host = HOST,  # of the blocks
    ) -> None:
        self._rank, self._device = rank, device
        self._arrays, self._inputs = arrays, inputs

    def __len__(self) -> int:
        return len(self._arrays)

    def copy_into(self, number: int, local_block: Array) -> None:
        """Copy the local block of one array into `local_block`."""
        spec = self._inputs[number]
        for (index, box), block in zip(spec.blocks(self._rank), self._arrays[number], strict=True):
            key, into = (f"input {number}", *index), local_block[box_slices(box)]
            block_array = checked_block(as_array(block), key, into.shape, spec.dtype)
            check_kind(self._device, f"block {key}", block_array)
            self._device.assign(into, block_array)

    def copy(self, number: int) -> Array:
        spec = self._inputs[number]
        local_block = self._device.empty(spec.shape(self._rank), spec.dtype)
        self.copy_into(number, local_block)
        return local_block


@dataclass(frozen=True)
class RankBody:
    """The work of a rank: joins its blocks, calls the function, and splits the result."""

    function: Callable[..., Any]
    ranks: RankGrid
    inputs: tuple[InputSpec, ...]
    outputs: Outputs
    kind: Kind = "numpy"
    context: ClassVar[Any] = Context

    @property
    def dtype(self) -> DType:
        """The dtype of the first array."""
        of_each: list[Any] = [*self.outputs.specs, *self.inputs]
        dtype: DType = np.dtype(of_each[0].dtype)
        return dtype

    @property
    def shape(self) -> tuple[float, ...]:
        """The shape of the first array; NaN along an axis of unknown length."""
        chunks = (
            self.outputs.specs[0].chunks(self.ranks) if self.outputs.specs else self.ranks.chunks
        )
        return tuple(map(sum, chunks))

    def __call__(self, ctx: Any, *arrays: Sequence[Any]) -> list[list[Any]]:
        given_bytes = sum(in_memory_bytes(block) for blocks in arrays for block in blocks)
        check_memory(replace(self._estimate(ctx.rank), input_bytes=given_bytes))
        with ctx.device.running([block for blocks in arrays for block in blocks]):
            local_blocks = LocalBlocks(ctx.rank, arrays, self.inputs, ctx.device)
            function = own_copy(self.function)  # lives until the device has done all work
            with warned_of_global_random(ctx.shares_process), _explain_errors(ctx):
                returned = function(ctx, local_blocks)
            return self.outputs.blocks(ctx, self.ranks, returned)

    def estimate(self) -> SectionEstimate:
        """Return the estimate of the rank that needs most memory."""
        estimates = map(self._estimate, range(self.ranks.size))
        return max(estimates, key=lambda estimate: estimate.total_bytes)

    def _estimate(self, rank: int) -> SectionEstimate:
        size = self.ranks.size
        inputs_bytes = [prod(spec.shape(rank)) * spec.dtype.itemsize for spec in self.inputs]
        output_bytes = sum(output.size_bytes(self.ranks, rank) for output in self.outputs.specs)
        input_bytes = sum(inputs_bytes)
        estimate = SectionEstimate(
            size,
            input_bytes,
            output_bytes,
            work_bytes=input_bytes,
            returned_bytes=output_bytes,
            kind=self.kind,
        )
        function_estimate: Any = getattr(self.function, "estimate", None)
        return (
            estimate
            if function_estimate is None
            else function_estimate(estimate, self.ranks, rank, inputs_bytes)
        )


@contextmanager
def _explain_errors(ctx: Context) -> Iterator[None]:
    """Name the rank, and the number of steps that it has done, in each exception.

    Methods that only mpi4py has get a remedy.
    """
    try:
        yield
    except BaseException as exc:
        if isinstance(exc, AttributeError) and exc.name and isinstance(exc.obj, Communicator):
            exc.args = (unknown_attribute(exc.obj, exc.name),)
        step, total = ctx.progress.step, ctx.progress.steps
        steps = f" after {step} {'step' if step == 1 else 'steps'}" if total or step else ""
        exc.add_note(f"Raised on rank {ctx.rank} of {ctx.size}{steps}.")
        raise


def own_copy(value: Any) -> Any:
    """Return a copy, as a rank in a process of its own would have it.

    Without copies, ranks of one process would change the same lists and dicts, and a rank that runs
    again would find them changed. Workers of one process also pass functions to each other without
    pickles, so their closures are copied, too. An object that cannot be copied, such as a lock, is
    shared.
    """
    worker, _ = current_worker()
    is_in_process = worker is not None and worker.address.startswith("inproc")
    return _copied(value, _pickled_copy if is_in_process else deepcopy)


def _copied(value: Any, copy: Callable[[Any], Any]) -> Any:
    try:
        return copy(value)
    except Exception:
        if is_dataclass(value) and not isinstance(value, type):
            copies = {
                field.name: _copied(getattr(value, field.name), copy) for field in fields(value)
            }
            return replace(value, **copies)
        if type(value) is dict:
            return {key: _copied(member, copy) for key, member in value.items()}
        if type(value) in (list, tuple, set):
            return type(value)(_copied(member, copy) for member in value)
        return value


def _pickled_copy(value: Any) -> Any:
    """Return a copy from a pickle, which shares no memory with the value."""
    buffers: list[PickleBuffer] = []
    pickled = cloudpickle.dumps(value, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    copies = [
        bytes(raw_buffer) if raw_buffer.readonly else bytearray(raw_buffer) for raw_buffer in raw
    ]
    return cloudpickle.loads(pickled, buffers=copies)


@dataclass(frozen=True, slots=True)
class SectionEstimate(MemoryEstimate):
    """Peak memory of one rank of `iterate` or `spmd`, and the bytes that it sends.

    Memory that the user's function allocates itself is not included. For `spmd` only the arrays
    that its function receives and returns are counted.

    Attributes
    ----------
    workers : int
        Number of ranks: one on each worker, if there are enough workers.
    input_bytes, output_bytes : int
        Input blocks and output blocks of a rank.
    staging_bytes, packed_bytes : int
        Received halos, and halos packed for other ranks.
    work_bytes : int
        Fields with their halos, memory for the next field, and the rank's local blocks of
        constants. For `spmd` the local blocks that its function receives.
    returned_bytes : int
        Arrays that the function returns, until the output blocks are copied from them: the fields
        with their halos. The rest of `work_bytes` and the exchanged halos are freed by then.
    state_bytes : int
        Checkpoints: the rank's own states and those of the rank that it guards, twice while they
        are replaced.
    frames_bytes : int
        Copies of local blocks that a thread writes as frames, in host memory.
    series_bytes : int
        Series of recorded numbers of all steps, and copies of them at the end, in host memory.
    step_bytes : int
        Bytes that a rank sends in a step.
    visit_bytes : int
        Bytes that a visit of streamed fields copies to the rank's GPU. It copies as many back. Its
        steps take at least this time of the bus in all.
    checkpoint_bytes : int
        Bytes that a rank copies for each checkpoint, and sends to another worker.
    kind : str
        Kind of the blocks: "numpy" or "cupy". For CuPy all but `state_bytes`, `frames_bytes` and
        `series_bytes` is GPU memory. Then `packed_bytes` holds two copies of the packed halos.
    """

    work_bytes: int = 0
    returned_bytes: int = 0
    state_bytes: int = 0
    frames_bytes: int = 0
    series_bytes: int = 0
    step_bytes: int = 0
    visit_bytes: int = 0
    checkpoint_bytes: int = 0
    kind: Kind = "numpy"

    @property
    def need(self) -> MemoryNeed:
        """Memory of the rank; for CuPy, that of its GPU."""
        states = self._on_host
        if self.kind != "numpy":  # copies without halos, which then go to the host
            states = {"copies for checkpoints": self.checkpoint_bytes}
        halos_bytes = self.staging_bytes + self.packed_bytes
        while_running = {"local blocks and halos": self.work_bytes + halos_bytes}
        after = {"returned arrays": self.returned_bytes, "output blocks": self.output_bytes}
        inputs = {"input blocks": self.input_bytes}
        return MemoryNeed({**inputs, **states}, (while_running, after), self.kind)

    @property
    def host_need(self) -> MemoryNeed:
        """Host memory of the rank: all of `need` for NumPy, additional memory for CuPy."""
        if self.kind == "numpy":
            return self.need
        halos_bytes = self.staging_bytes + self.packed_bytes
        return MemoryNeed({"halos in transfer": halos_bytes, **self._on_host})

    @property
    def _on_host(self) -> dict[str, int]:
        return {
            "checkpoints": self.state_bytes,
            "copies of frames": self.frames_bytes,
            "series of records": self.series_bytes,
        }

    @property
    def total_bytes(self) -> int:
        """Peak memory of the rank; for CuPy, that of its GPU."""
        return self.need.peak_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory: all of `total_bytes` for NumPy, additional memory for CuPy."""
        return self.host_need.peak_bytes

    def __str__(self) -> str:
        total, step, checkpoint = map(
            format_bytes, (self.total_bytes, self.step_bytes, self.checkpoint_bytes)
        )
        visited = format_bytes(self.visit_bytes)
        visit = f"; a visit copies {visited} to the GPU and back" if self.visit_bytes else ""
        on_host = "" if self.kind == "numpy" else f", and {self.host_need.purposes} on the host"
        return (
            f"{self.workers} rank{'s' * (self.workers > 1)}: at most {total} each "
            f"({self.need.purposes}){on_host}; each sends {step} per step, and "
            f"{checkpoint} per checkpoint{visit}"
        )


def check_memory(estimate: SectionEstimate) -> None:
    """Refuse a rank that can never fit into this worker's memory: `MemoryLimitError`."""
    worker, _ = current_worker()
    worker_bytes = worker.memory_manager.memory_limit if worker is not None else None
    records = "Give fewer steps, or Record(function, every=...). " if estimate.series_bytes else ""
    for need in (estimate.host_need, estimate.need):
        limit_bytes = backend_named(need.kind).memory_below(need.peak_bytes, worker_bytes)
        need.check(
            limit_bytes,
            "a rank",
            where_is(worker),
            f"{records}Spread the array over more workers, or do without checkpoints, "
            f"checkpoint_every=None. Call dask_p2p.estimate(y) for this figure before a run.",
        )


# NumPy's global random numbers, which the ranks in threads of one process share.
#
# ``np.random.seed`` of one rank changes the numbers of the others, so results depend on the ranks
# of a process, and on the order in which they run. Nothing can give each thread a state of its own.


@contextmanager
def warned_of_global_random(is_shared: bool) -> Iterator[None]:
    """Warn if the function of a rank draws NumPy's global random numbers, and others run here."""
    before = _state() if is_shared else None
    yield
    if before is None or _state() == before:
        return
    warn(
        "a function drew NumPy's global random numbers (np.random.seed, np.random.rand), which "
        "ranks in threads of one worker share: each rank gets other numbers in each run, and with "
        "other workers. Draw from a generator of the rank, np.random.default_rng((seed, "
        "ctx.rank)), or use workers of one thread.",
        P2PWarning,
    )


def _state() -> tuple[Any, ...]:
    """Return the state of NumPy's global random numbers, such that equal states compare equal."""
    state: Any = np.random.get_state()
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)
