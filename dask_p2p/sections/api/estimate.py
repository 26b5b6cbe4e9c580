"""Estimates, before a run, of the memory and messages of a section's ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dask.utils import format_bytes

from dask_p2p.backends import backend_named
from dask_p2p.engine.context import where_is
from dask_p2p.engine.memory import MemoryNeed
from dask_p2p.engine.task import current_worker
from dask_p2p.ops.estimate import MemoryEstimate
from dask_p2p.types import Kind


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
    checkpoint_bytes : int
        Bytes that a rank copies for each checkpoint, and sends to another worker.
    kind : str
        Kind of the blocks: "numpy" or "cupy". For CuPy all but `state_bytes`, `frames_bytes` and
        `series_bytes` is GPU memory. Then `packed_bytes` holds two copies of the packed halos.
    """

    work_bytes: int
    returned_bytes: int
    state_bytes: int = 0
    frames_bytes: int = 0
    series_bytes: int = 0
    step_bytes: int = 0
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
        """Memory of the host for both kinds."""
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
        on_host = "" if self.kind == "numpy" else f", and {self.host_need.purposes} on the host"
        return (
            f"{self.workers} rank{'s' * (self.workers > 1)}: at most {total} each "
            f"({self.need.purposes}){on_host}; each sends {step} a step, and {checkpoint} a "
            f"checkpoint"
        )


def check_memory(estimate: Callable[[], SectionEstimate]) -> None:
    """Refuse a rank that can never fit into this worker's memory: `MemoryLimitError`."""
    worker, _ = current_worker()
    worker_bytes = worker.memory_manager.memory_limit if worker is not None else None
    found = estimate()
    records = "Give fewer steps, or Record(function, every=...). " if found.series_bytes else ""
    for need in (found.host_need, found.need):
        limit_bytes = backend_named(need.kind).memory_below(need.peak_bytes, worker_bytes)
        need.check(
            limit_bytes,
            "a rank",
            where_is(worker),
            f"{records}Spread the array over more workers, or do without checkpoints, "
            f"checkpoint_every=None. Call dask_p2p.estimate(y) for this figure before a run.",
        )
