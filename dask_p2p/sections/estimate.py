"""What members of a section have in memory, and what they exchange: known before they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from dask.utils import format_bytes

from dask_p2p.backends import backend_named
from dask_p2p.engine.context import where_is
from dask_p2p.engine.task import current_worker
from dask_p2p.errors import MemoryLimitError
from dask_p2p.ops.estimate import MemoryEstimate
from dask_p2p.plans.members import Members
from dask_p2p.plans.rims import Rims
from dask_p2p.sections.windows import SLOTS
from dask_p2p.types import DType, Kind

__all__ = ["SectionEstimate", "check_memory", "iterated", "section_estimate"]

_GENERATIONS = 2  # of states, while one of them is made: see `dask_p2p.sections.saved`


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
    state_bytes: int
    step_bytes: int
    checkpoint_bytes: int
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


def section_estimate(
    members: Members,
    rank: int,
    inputs: Sequence[DType],
    outputs: int,
    dtype: DType,
    kind: Kind = "numpy",
) -> SectionEstimate:
    """Return what is known of any function's member: blocks, and shares of all inputs.

    Parameters
    ----------
    members, rank
        Which member has what, and which of them this is.
    inputs
        The dtype of each array.
    outputs, dtype
        How many arrays the function makes, and of which dtype.
    kind
        Of the blocks.
    """
    count = prod(members.shape(rank))
    given_bytes = sum(count * each.itemsize for each in inputs)
    made_bytes = outputs * count * dtype.itemsize
    return SectionEstimate(
        workers=members.size,
        input_bytes=given_bytes,
        output_bytes=made_bytes,
        staging_bytes=0,
        packed_bytes=0,
        work_bytes=given_bytes,
        returned_bytes=made_bytes,
        state_bytes=0,
        step_bytes=0,
        checkpoint_bytes=0,
        kind=kind,
    )


def iterated(
    found: SectionEstimate,
    rims: Rims,
    fields: int,
    constants: Sequence[DType],
    dtype: DType,
    has_checkpoints: bool,
) -> SectionEstimate:
    """Return the same for a member of `iterate`.

    Parameters
    ----------
    found
        What `section_estimate` says of it.
    rims
        Around its share.
    fields, constants
        How many fields there are, and the dtypes of constants that are arrays.
    dtype
        Of the fields.
    has_checkpoints
        Whether there may be some.
    """
    count, item_bytes = prod(stop - start for start, stop in rims.inner), dtype.itemsize
    state_bytes = fields * count * item_bytes if has_checkpoints and found.workers > 1 else 0
    packed_bytes, staging_bytes = (
        sum(prod(hi - lo for lo, hi in box) for boxes in each.values() for box in boxes)
        * item_bytes
        for each in (rims.sends, rims.receives)
    )
    padded_bytes = prod(rims.shape) * item_bytes
    constants_bytes = sum(count * each.itemsize for each in constants)
    return replace(
        found,
        work_bytes=(fields + 1) * padded_bytes + constants_bytes,
        returned_bytes=fields * padded_bytes,
        staging_bytes=staging_bytes,
        packed_bytes=packed_bytes * (1 if found.kind == "numpy" else SLOTS),
        state_bytes=2 * _GENERATIONS * state_bytes,
        step_bytes=packed_bytes,
        checkpoint_bytes=state_bytes,
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
