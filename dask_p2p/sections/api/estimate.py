"""Estimates, before a run, of the memory and messages of a section's ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dask.utils import format_bytes

from dask_p2p.backends import backend_named
from dask_p2p.engine.context import where_is
from dask_p2p.engine.task import current_worker
from dask_p2p.errors import MemoryLimitError
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
    step_bytes : int
        Bytes that a rank sends in a step.
    checkpoint_bytes : int
        Bytes that a rank copies for each checkpoint, and sends to another worker.
    kind : str
        Kind of the blocks: "numpy" or "cupy". For CuPy all but `state_bytes` is GPU memory, and
        `packed_bytes` holds two copies of the packed halos.
    """

    work_bytes: int
    returned_bytes: int
    state_bytes: int = 0
    step_bytes: int = 0
    checkpoint_bytes: int = 0
    kind: Kind = "numpy"

    @property
    def total_bytes(self) -> int:
        """Peak memory of the rank; for CuPy, that of its GPU."""
        while_bytes = self.work_bytes + self.staging_bytes + self.packed_bytes
        after_bytes = self.returned_bytes + self.output_bytes
        # A GPU has copies without halos for checkpoints, which then go to the host.
        state_bytes = self.state_bytes if self.kind == "numpy" else self.checkpoint_bytes
        return self.input_bytes + state_bytes + max(while_bytes, after_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory: all of `total_bytes` for NumPy, additional memory for CuPy."""
        if self.kind == "numpy":
            return self.total_bytes
        return self.state_bytes + self.staging_bytes + self.packed_bytes

    def __str__(self) -> str:
        named = {
            "input blocks": self.input_bytes,
            "local blocks and halos": self.work_bytes + self.staging_bytes + self.packed_bytes,
            f"checkpoints{' on the host' * (self.kind != 'numpy')}": self.state_bytes,
            "output blocks after that": self.output_bytes,
        }
        parts = ", ".join(f"{format_bytes(of)} {name}" for name, of in named.items())
        step, checkpoint = map(format_bytes, (self.step_bytes, self.checkpoint_bytes))
        return (
            f"{self.workers} rank{'s' * (self.workers > 1)}: at most "
            f"{format_bytes(self.total_bytes)} each ({parts}); each sends {step} a step, and "
            f"{checkpoint} a checkpoint"
        )


def check_memory(estimate: Callable[[], SectionEstimate]) -> None:
    """Refuse a rank that can never fit into this worker's memory: `MemoryLimitError`."""
    worker, _ = current_worker()
    worker_bytes = worker.memory_manager.memory_limit if worker is not None else None
    found = estimate()
    needed = {"numpy": found.host_bytes, found.kind: found.total_bytes}
    for kind, needed_bytes in needed.items():
        limit_bytes = backend_named(kind).memory_below(needed_bytes, worker_bytes)
        if limit_bytes is not None:
            where = where_is(worker)
            missing_bytes = needed_bytes - limit_bytes
            raise MemoryLimitError(
                f"expected a rank that fits into the {format_bytes(limit_bytes)} of "
                f"{'' if kind == 'numpy' else 'the GPU of '}{where}, got one of {found}; "
                f"{format_bytes(missing_bytes)} are missing. "
                f"Spread the array over more workers, or do without checkpoints, "
                f"checkpoint_every=None. Call dask_p2p.estimate(y) for this figure before a run.",
                needed_bytes,
                missing_bytes,
            )
