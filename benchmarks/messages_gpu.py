"""Messages of CuPy arrays between two GPUs, and sums, compared with copy engines and NCCL.

    timeout 100 python -m benchmarks.messages --gpu --json FILE

Each rank has one GPU. A message goes there and back. "copy engine" is a plain copy of the same
bytes from one GPU to the other, by one call of CUDA. A clock stops when the GPU is done, and a time
is that of the fastest round. Values are checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import Any

import dask.array as da
import numpy as np

import dask_p2p
from benchmarks.rivals.mpi_messages import ALLREDUCE, INTO, NEW, ping_pong
from benchmarks.sections_calls import attempt

__all__ = ["measured"]

COPY, NCCL = "copy engine", "allreduce of NCCL"
SIZES = (8, 1 << 16, 1 << 20, 1 << 26, 1 << 28, 1 << 30)
_WAYS = (NEW, INTO, COPY, ALLREDUCE, NCCL)
_LIMITS = {NEW: COPY, INTO: COPY, ALLREDUCE: NCCL}
_SUMMED = (1 << 20, 1 << 28)  # sizes of arrays that are summed, too
_POOL_BYTES = 2**34
_TIMEOUT_S = 60.0
_Call = Callable[[], Any]


class _Clock:
    """Times calls that all ranks make, until their GPUs are done."""

    def __init__(self, ctx: Any, module: Any, rounds: int, count: int) -> None:
        self._ctx, self._rounds, self._count = ctx, rounds, count
        self._is_on_gpu, self._module = module is not np, module

    def _wait(self) -> None:
        if self._is_on_gpu:
            self._module.cuda.get_current_stream().synchronize()

    def least_s(self, call: _Call) -> float:
        """Return the seconds of a call in the fastest round, after one that does not count."""
        times_s = []
        for _ in range(self._rounds + 1):
            self._wait()
            self._ctx.barrier()
            start_s = time.perf_counter()
            for _ in range(self._count):
                call()
            self._wait()
            times_s.append((time.perf_counter() - start_s) / self._count)
        return min(times_s[1:], default=inf)


def timed(ctx: Any, like: Any, size_bytes: int, rounds: int) -> Any:
    """Return a rank's seconds of each way."""
    module: Any = np
    if not isinstance(like, np.ndarray):
        import cupy as module  # type: ignore[no-redef]
    peer, seconds = 1 - ctx.rank, dict.fromkeys(_WAYS, np.nan)
    sent = module.full(size_bytes // 4, ctx.rank + 1, "f4")
    into = module.zeros_like(sent)
    clock = _Clock(ctx, module, rounds, 20 if size_bytes < 1 << 26 else 4)
    for way, out in ((NEW, None), (INTO, into)):
        receive = partial(ctx.recv, peer, out=out)
        call = ping_pong(ctx.rank, lambda: ctx.send(sent, peer), receive)
        seconds[way] = clock.least_s(call) / 2
    _check(into, peer + 1)
    with _plain_copy(ctx.rank, into) as copy:
        copy_s = clock.least_s(copy or (lambda: None))
        seconds[COPY] = np.nan if ctx.rank == 0 and copy is None else copy_s
    if size_bytes in _SUMMED:
        seconds[ALLREDUCE] = clock.least_s(lambda: ctx.allreduce(sent))
        _check(ctx.allreduce(sent), 3)
        with _nccl_sum(ctx, sent, into) as by_nccl:
            if by_nccl is not None:
                seconds[NCCL] = clock.least_s(by_nccl)
                _check(into, 3)
    return np.array([*seconds.values()])


def _check(array: Any, value: float) -> None:
    if not bool((array == value).all()):
        raise AssertionError(f"expected {value} everywhere, got {array}")


@contextmanager
def _plain_copy(rank: int, into: Any) -> Iterator[_Call | None]:
    """Yield a copy from the other GPU's memory, on rank 0; None without such a GPU."""
    if rank or isinstance(into, np.ndarray):
        yield None
        return
    import cupy

    runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream()
    device = runtime.getDevice()
    peer_device = next((n for n in range(runtime.getDeviceCount()) if n != device), None)
    if peer_device is None or not runtime.deviceCanAccessPeer(device, peer_device):
        yield None
        return
    with suppress(runtime.CUDARuntimeError):  # it is enabled already
        runtime.deviceEnablePeerAccess(peer_device)
    with cupy.cuda.Device(peer_device):
        source = runtime.malloc(into.nbytes)
    try:
        copy_arguments = into.data.ptr, device, source, peer_device, into.nbytes, stream.ptr
        yield lambda: runtime.memcpyPeerAsync(*copy_arguments)
        stream.synchronize()
    finally:
        runtime.free(source)


@contextmanager
def _nccl_sum(ctx: Any, sent: Any, into: Any) -> Iterator[_Call | None]:
    """Yield a sum of all ranks' arrays by NCCL; None without NCCL."""
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError:
        yield None
        return
    if isinstance(sent, np.ndarray) or not nccl.available:
        yield None
        return
    stream = cupy.cuda.get_current_stream()
    communicator = nccl.NcclCommunicator(ctx.size, ctx.nccl_id(), ctx.rank)
    kinds = nccl.NCCL_FLOAT32, nccl.NCCL_SUM
    try:
        yield lambda: communicator.allReduce(
            sent.data.ptr, into.data.ptr, sent.size, *kinds, stream.ptr
        )
        stream.synchronize()
    finally:
        communicator.destroy()


def _times_of(x: Any, size_bytes: int, rounds: int) -> dict[str, float]:
    """Return the seconds of each way in a section."""
    from distributed import get_client

    outputs = dask_p2p.PerRank(np.zeros(len(_WAYS)))
    y: Any = dask_p2p.spmd(timed, x, outputs=outputs, size_bytes=size_bytes, rounds=rounds)
    slowest = get_client().compute(y).result(timeout=_TIMEOUT_S).max(axis=0).tolist()
    return {way: own_s for way, own_s in zip(_WAYS, slowest, strict=True) if own_s == own_s}


def measured(sizes: Sequence[int], rounds: int, on_cpu: bool = False) -> list[dict[str, Any]]:
    """Print and return the seconds of each way, by size. Another size follows after a failure."""
    from distributed import Client

    rows: list[dict[str, Any]] = []
    of_gpus: dict[str, Any] = {} if on_cpu else {"rmm_pool_size": _POOL_BYTES}
    with (
        dask_p2p.local_cluster(2, gpus=not on_cpu, **of_gpus) as cluster,
        Client(cluster) as client,
    ):
        dask_p2p.register(client)
        x = da.zeros(2, chunks=1)
        if not on_cpu:
            import cupy

            x = x.map_blocks(cupy.asarray, meta=cupy.zeros(0))
        for size_bytes in sizes:
            text = f"{size_bytes} bytes"
            times = attempt(text, partial(_times_of, x, size_bytes, rounds))
            for way, own_s in (times or {}).items():
                limit_s = times.get(_LIMITS.get(way))
                ratio = "" if limit_s is None else f", {limit_s / own_s:6.2f} x {_LIMITS[way]}"
                rate = f"{size_bytes / own_s / 1e9:8.2f} GB/s"
                print(f"{text:>16}, {way:>18}: {own_s * 1e6:10.2f} us, {rate}{ratio}", flush=True)
            rows.append({"bytes": size_bytes, "times_s": times})
    return rows
