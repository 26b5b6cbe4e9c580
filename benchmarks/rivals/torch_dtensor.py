"""PyTorch's DTensor: a sharded matrix redistributed and transposed.

    python -m benchmarks.rivals.torch_dtensor --gpus 8 --size 65536 --size 131072

One process a GPU. `redistribute` changes the placement from `Shard(0)` to `Shard(1)` by an
all-to-all of NCCL, and each process copies the transpose of its shard into memory order. The
program times both orders, and reports the faster one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.rivals.common import Case, parser, read, row
from benchmarks.rivals.torch_nccl import count_wrong, input_slab, start, time_runs, versions

WAY = "torch DTensor"


def transpose_first(x: Any) -> Any:
    """Return the transpose in row slabs; its copy comes before the all-to-all."""
    from torch.distributed.tensor import Shard

    return x.t().redistribute(placements=[Shard(0)]).contiguous()


def redistribute_first(x: Any) -> Any:
    """Return the transpose in row slabs; its copy comes after the all-to-all."""
    from torch.distributed.tensor import Shard

    return x.redistribute(placements=[Shard(1)]).t().contiguous()


FORMS = {
    "transpose, then redistribute": transpose_first,
    "redistribute, then transpose": redistribute_first,
}


def measure(case: Case, rank: int, device: Any) -> dict[str, Any]:
    """Time the transpose of one matrix, and check it."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    slab = input_slab(case, rank, device)
    x = DTensor.from_local(slab, mesh, [Shard(0)])
    # Timed results are new tensors with negative values. The checked one may get their memory, and
    # elements that it does not write count as wrong.
    slab.neg_()
    runs = {name: partial(form, x) for name, form in FORMS.items()}
    timing = time_runs(runs, device, case.repeats)

    slab.neg_()
    y = runs[timing.form]()
    if y.shape != x.shape or y.dtype != x.dtype or y.placements != x.placements:
        raise ValueError(f"the result is {y.dtype} of {tuple(y.shape)}, placed as {y.placements}")
    wrong_count = count_wrong(case, rank, y.to_local(), device)
    return row(WAY, case, timing, wrong_count, versions=versions(case))


def main() -> None:
    """Read the command line, start a process a GPU."""
    start(read(parser(__doc__)), measure)


if __name__ == "__main__":
    main()
