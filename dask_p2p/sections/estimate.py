"""What members of a section have in memory, and what they exchange: known before they run."""

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
    """What one member of `iterate` or `spmd` holds at most, and what it sends.

    What the user's function allocates itself comes to that. Of `spmd` nobody knows what its
    function does: there are the arrays that it is given, and those that it returns.

    Attributes
    ----------
    workers : int
        Number of members: one on each worker, if there are as many.
    input_bytes, output_bytes : int
        The blocks that a member is given, and those that it makes.
    staging_bytes, packed_bytes : int
        Rims that come, and rims packed for others.
    work_bytes : int
        Fields with their rims, and memory for the next one; the member's shares of constants. Of
        `spmd` the shares that its function is given.
    returned_bytes : int
        What the function returns, until the output's blocks are copied from it: the fields with
        their rims. The rest of `work_bytes`, and rims, are gone by then.
    state_bytes : int
        Of checkpoints: the member's own states and those of another one, twice while they are
        replaced.
    step_bytes : int
        What a member sends to others in a step.
    checkpoint_bytes : int
        What a member copies for each checkpoint, and sends to another worker.
    kind : str
        Of the blocks: "numpy", or "cupy". Of CuPy all is memory of the GPU but `state_bytes`, and
        rims are packed in two places: `packed_bytes`.
    """

    work_bytes: int
    returned_bytes: int
    state_bytes: int = 0
    step_bytes: int = 0
    checkpoint_bytes: int = 0
    kind: Kind = "numpy"

    @property
    def total_bytes(self) -> int:
        """All of it: the member's peak; of CuPy that of its GPU's memory."""
        while_bytes = self.work_bytes + self.staging_bytes + self.packed_bytes
        after_bytes = self.returned_bytes + self.output_bytes
        # On a GPU there are copies without rims, which go to the host.
        state_bytes = self.state_bytes if self.kind == "numpy" else self.checkpoint_bytes
        return self.input_bytes + state_bytes + max(while_bytes, after_bytes)

    @property
    def host_bytes(self) -> int:
        """Of that, or beside it if blocks are CuPy's, what is in host memory."""
        if self.kind == "numpy":
            return self.total_bytes
        return self.state_bytes + self.staging_bytes + self.packed_bytes

    def __str__(self) -> str:
        named = {
            "blocks given": self.input_bytes,
            "shares and rims": self.work_bytes + self.staging_bytes + self.packed_bytes,
            f"checkpoints{' on the host' * (self.kind != 'numpy')}": self.state_bytes,
            "blocks made after that": self.output_bytes,
        }
        parts = ", ".join(f"{format_bytes(of)} {name}" for name, of in named.items())
        step, checkpoint = map(format_bytes, (self.step_bytes, self.checkpoint_bytes))
        return (
            f"{self.workers} member{'s' * (self.workers > 1)}: at most "
            f"{format_bytes(self.total_bytes)} each ({parts}); each sends {step} a step, and "
            f"{checkpoint} a checkpoint"
        )


def check_memory(estimate: Callable[[], SectionEstimate]) -> None:
    """Refuse a member that can never fit into this worker's memory: `MemoryLimitError`."""
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
                f"expected a member that fits into the {format_bytes(limit_bytes)} of "
                f"{'' if kind == 'numpy' else 'the GPU of '}{where}, got one of {found}; "
                f"{format_bytes(missing_bytes)} are missing. "
                f"Spread the array over more workers, or do without checkpoints, "
                f"checkpoint_every=None. dask_p2p.estimate(y) tells it before.",
                needed_bytes,
                missing_bytes,
            )
