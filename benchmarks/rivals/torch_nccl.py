"""PyTorch with NCCL: one process a GPU, `all_to_all_single` with pack and unpack.

    python -m benchmarks.rivals.torch_nccl --gpus 8 --size 65536 --size 131072

NCCL moves contiguous buffers only. So each slab is packed into one tile for each GPU, and received
tiles are unpacked into the slab of the result. One of the two passes transposes, the other is a
plain 2-D copy. Both orders are tried, with the slab in one part and in several. With several, one
part travels while the next is packed and the previous one is unpacked, on separate streams. The
fastest form is reported, with the time of the all-to-all alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.rivals.common import Case, Timing, cases, emit, parser, read, row, time_forms

WAY = "torch + NCCL"

#: By the order of transpose and send: axes of pack and of unpack; see `transpose`.
ORDERS = {
    "transpose, then send": ((1, 2, 0), (1, 0, 2)),
    "send, then transpose": ((1, 0, 2), (2, 0, 1)),
}

PARTS = (1, 4, 16)

#: A value of no element, so that unwritten elements count as wrong.
POISON = -1


def input_parts(slab: Any, gpus: int, parts: int) -> Any:
    """View a slab of the input as (row, receiving GPU, part, column)."""
    rows, size = slab.shape
    return slab.reshape(rows, gpus, parts, size // gpus // parts)


def output_parts(slab: Any, gpus: int, parts: int) -> Any:
    """View a slab of the output as (part, row, sending GPU, column)."""
    rows, size = slab.shape
    return slab.reshape(parts, rows // parts, gpus, size // gpus)


def buffer_shape(case: Case, order: str, parts: int) -> tuple[int, int, int]:
    """Return the shape of the buffers of one part: a tile for, or from, each GPU."""
    width = case.rows // parts
    pack, _ = ORDERS[order]
    lengths = (case.rows, case.gpus, width)
    return lengths[pack[0]], lengths[pack[1]], lengths[pack[2]]


def transpose(
    case: Case,
    order: str,
    parts: int,
    slabs: tuple[Any, Any],
    buffers: tuple[Any, Any],
    streams: tuple[Any, Any],
) -> None:
    """Exchange the slabs of all processes; on GPUs return before the exchange ends.

    Parameters
    ----------
    case, order, parts
        `order` is a key of `ORDERS`; `parts` divides the slab's rows.
    slabs
        The input's and the output's slab, as matrices.
    buffers
        Send and receive buffers of a slab's size, so that parts never wait for a buffer.
    streams
        The streams for packing and unpacking; NCCL has its own.
    """
    import torch
    import torch.distributed as dist

    pack, unpack = ORDERS[order]
    shape = buffer_shape(case, order, parts)
    source = input_parts(slabs[0], case.gpus, parts)
    target = output_parts(slabs[1], case.gpus, parts)
    sent = buffers[0].reshape(parts, *shape)
    received = buffers[1].reshape(parts, *shape)
    packing, unpacking = streams
    for part in range(parts):
        with torch.cuda.stream(packing):
            sent[part].copy_(source[:, :, part].permute(pack))
            # As bytes: neither NCCL nor Gloo supports all dtypes.
            work = dist.all_to_all_single(
                received[part].reshape(-1).view(torch.uint8),
                sent[part].reshape(-1).view(torch.uint8),
                async_op=True,
            )
        with torch.cuda.stream(unpacking):
            work.wait()  # with NCCL the stream waits, not the process
            target[part].copy_(received[part].permute(unpack))


def exchange_alone(buffers: tuple[Any, Any]) -> None:
    """Do the all-to-all of whole slabs, without packing or unpacking."""
    import torch
    import torch.distributed as dist

    dist.all_to_all_single(buffers[1].view(torch.uint8), buffers[0].view(torch.uint8))


def start(options: Namespace, measure: Callable[[Case, int, Any], dict[str, Any]]) -> None:
    """Start a process a GPU; each calls ``measure(case, rank, device)`` for each size."""
    if find_spec("torch") is None:
        sys.exit("torch is not installed")
    import torch

    device_count = torch.cuda.device_count()
    if not options.cpu and device_count < options.gpus:
        sys.exit(f"expected {options.gpus} GPUs, torch finds {device_count}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            one_of_many,
            args=(os.path.join(folder, "store"), options, measure),
            nprocs=options.gpus,
        )


def one_of_many(
    rank: int, store: str, options: Namespace, measure: Callable[[Case, int, Any], dict[str, Any]]
) -> None:
    """Measure as the process of one GPU."""
    import torch
    import torch.distributed as dist

    place: dict[str, Any] = {"init_method": f"file://{store}"}
    if options.cpu:
        device = torch.device("cpu")
        dist.init_process_group("gloo", rank=rank, world_size=options.gpus, **place)
    else:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        # Packing fills the whole GPU; NCCL's kernels must not wait behind it.
        place["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        dist.init_process_group(
            "nccl", rank=rank, world_size=options.gpus, device_id=device, **place
        )
    for case in cases(options):
        report = measure(case, rank, device)
        if rank == 0:
            emit(report, options.json)
    dist.destroy_process_group()


def measure(case: Case, rank: int, device: Any) -> dict[str, Any]:
    """Time the transpose of one matrix, and check it."""
    import torch

    x = input_slab(case, rank, device)
    y = torch.empty_like(x)
    buffers = torch.empty_like(x).reshape(-1), torch.empty_like(x).reshape(-1)
    streams: tuple[Any, Any] = (None, None)
    if not case.cpu:
        streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
    runs = forms(case, (x, y), buffers, streams)
    timing = time_runs(runs, device, case.repeats)
    alone = time_runs({"all-to-all": partial(exchange_alone, buffers)}, device, 3)

    for stale in (y, *buffers):
        stale.fill_(POISON)
    seconds(runs[timing.form], device)
    wrong_count = count_wrong(case, rank, y, device)
    alone_s = alone.forms_s["all-to-all"]
    return row(WAY, case, timing, wrong_count, all_to_all_s=alone_s, versions=versions(case))


def input_slab(case: Case, rank: int, device: Any) -> Any:
    """Return the slab of process `rank` of the input."""
    import torch

    dtype = getattr(torch, case.dtype)
    slab = torch.empty((case.rows, case.size), dtype=dtype, device=device)
    for start, stop in case.bands():
        slab[start:stop] = expected(case, rank, start, stop, device, transposed=False)
    return slab


def time_runs(runs: Mapping[str, Callable[[], Any]], device: Any, repeats: int) -> Timing:
    """Time the fastest form by `seconds`.

    All processes get the slowest process's times, and therefore choose the same form.
    """
    timed = {name: partial(seconds, run, device) for name, run in runs.items()}
    return time_forms(timed, repeats)


def seconds(run: Callable[[], Any], device: Any) -> float:
    """Time one run, from a common start to the end of the slowest process."""
    import torch
    import torch.distributed as dist

    synchronize(device)
    dist.barrier()
    synchronize(device)
    start_s = time.perf_counter()
    run()
    synchronize(device)
    took_s = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64, device=device)
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    return float(took_s.item())


def versions(case: Case) -> dict[str, str]:
    """Return the versions of torch and, on GPUs, of NCCL."""
    import torch

    nccl = {} if case.cpu else {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return {"torch": torch.__version__, **nccl}


def forms(
    case: Case, slabs: tuple[Any, Any], buffers: tuple[Any, Any], streams: tuple[Any, Any]
) -> dict[str, Callable[[], None]]:
    """Return the transpose in each order, with each number of parts; see `transpose`."""
    return {
        f"{order}, {parts} part{'s' if parts > 1 else ''}": partial(
            transpose, case, order, parts, slabs, buffers, streams
        )
        for order in ORDERS
        for parts in PARTS
        if case.rows % parts == 0
    }


def count_wrong(case: Case, rank: int, y: Any, device: Any) -> int:
    """Count the wrong elements in the slabs of all processes."""
    import torch
    import torch.distributed as dist

    wrong_count = torch.zeros(1, dtype=torch.int64, device=device)
    for start, stop in case.bands():
        wrong_count += (y[start:stop] != expected(case, rank, start, stop, device)).sum()
    dist.all_reduce(wrong_count)
    return int(wrong_count.item())


def expected(
    case: Case, rank: int, start: int, stop: int, device: Any, transposed: bool = True
) -> Any:
    """Return these rows of the slab of process `rank`, of the result or of the input."""
    import torch

    rows = torch.arange(start, stop, dtype=torch.int64, device=device) + rank * case.rows
    columns = torch.arange(case.size, dtype=torch.int64, device=device)
    if transposed:
        index = rows[:, None] + columns[None, :] * case.size
    else:
        index = rows[:, None] * case.size + columns[None, :]
    return index.remainder_(case.modulus).to(getattr(torch, case.dtype))


def synchronize(device: Any) -> None:
    """Wait until a GPU has finished all queued work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Read the command line, start a process a GPU."""
    start(read(parser(__doc__)), measure)


if __name__ == "__main__":
    main()
