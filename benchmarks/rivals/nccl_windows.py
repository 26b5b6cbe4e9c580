"""NCCL windows: the transposes of `torch_nccl`, with an all-to-all by copy engines.

    python -m benchmarks.rivals.nccl_windows --gpus 8 --size 65536 --size 131072

The send and receive buffers are windows (`ncclCommWindowRegister`), which all processes map. With a
policy of no thread blocks, `ncclAlltoAll` of windows uses copy engines, and leaves the GPU's
multiprocessors to the packing and unpacking. On CPUs the buffers are plain memory.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.rivals import torch_nccl
from benchmarks.rivals.common import Case, parser, read

WAY = "NCCL windows"

_NO_THREAD_BLOCKS = "2"  # NCCL_CTA_POLICY_ZERO
_FIRST_VERSION = (2, 28)  # whose all-to-all is a collective with this policy


def measure(case: Case, rank: int, device: Any) -> dict[str, Any]:
    """Time the transpose of one matrix, and check it."""
    import torch
    import torch.distributed as dist

    if case.cpu:
        return torch_nccl.measure(case, rank, device, WAY)
    if (version := torch.cuda.nccl.version()) < _FIRST_VERSION:
        needed = ".".join(map(str, _FIRST_VERSION))
        raise ValueError(f"expected NCCL {needed} or later, got {'.'.join(map(str, version))}")
    backend = dist.group.WORLD._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    # One allocation for both: two might be registered in different orders by two processes.
    with torch.cuda.use_mem_pool(pool):
        shape = (2, case.rows * case.size)
        buffers = torch.empty(shape, dtype=getattr(torch, case.dtype), device=device)
    backend.register_mem_pool(pool, symm=True)
    report = torch_nccl.measure(case, rank, device, WAY, (buffers[0], buffers[1]))
    backend.deregister_mem_pool(pool)
    del buffers  # before its pool
    return report


def main() -> None:
    """Read the command line, start a process a GPU."""
    options = read(parser(__doc__))
    os.environ["NCCL_CTA_POLICY"] = _NO_THREAD_BLOCKS
    torch_nccl.start(options, measure)


if __name__ == "__main__":
    main()
