"""CUDA graphs of the work that a rank enqueues on its stream."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from dask_p2p.errors import InputError
from dask_p2p.interprocess import cuda_ipc

if TYPE_CHECKING:
    from dask_p2p.sections.gpu.streams import GpuStreams

# Memory pools for graphs, by device. They are never dropped: memory of a function that raised is
# freed later, and CuPy crashes if the garbage collector finds a pool and its memory together.
_pools: defaultdict[int, list[Any]] = defaultdict(list)
_lock = threading.Lock()

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_NAME_BYTES = 32  # size of a GPU's name


def can_wait_for_peers() -> bool:
    """Return whether the work of a stream may wait for a peer, and other streams go on.

    With one connection all streams of a process share a queue. Two gangs then wait in a circle: in
    the queue of each GPU the work of one gang waits, and that of the other one is behind it.
    """
    return os.environ.get(_CONNECTIONS) != "1"


def own_gpu() -> bytes:
    """Return the name of this rank's GPU, for `share_gpus`: as many bytes on each rank."""
    return cuda_ipc.gpu_uuid().encode().ljust(_NAME_BYTES)


def share_gpus(names: Sequence[bytes]) -> bool:
    """Return whether ranks share a GPU, from the name of each rank's GPU.

    Ranks that wait on the same GPU for each other take turns: a time slice each.
    """
    return len({*names}) < len(names)


def captured(gpu: GpuStreams, work: Callable[[], None]) -> Callable[[], None]:
    """Capture all that `work` enqueues; return a function that launches it as one graph.

    The work is not executed now. The graph holds the addresses of the current arrays, and memory
    that `work` allocates stays until the section ends. Raises `InputError` if the work cannot be
    captured.
    """
    cuda, stream = gpu.module.cuda, gpu.stream
    pools = _pools[cuda.runtime.getDevice()]
    with _lock:
        pool = pools.pop() if pools else cuda.MemoryPool()
    gpu.closing.append(partial(pools.append, pool))
    gpu.closing.append(pool.free_all_blocks)  # called first, from the end of the list
    try:
        with cuda.using_allocator(pool.malloc), gpu.capturing() as capturing:
            capturing.begin_capture()
            try:
                work()
            except BaseException:
                with suppress(cuda.runtime.CUDARuntimeError):
                    capturing.end_capture()
                raise
            graph = capturing.end_capture()
    except MemoryError:
        pool.free_all_blocks()
        raise
    except RuntimeError as exc:  # from CUDA, or from CuPy, which refuses some calls itself
        pool.free_all_blocks()
        if not isinstance(exc, cuda.runtime.CUDARuntimeError) and "captur" not in str(exc):
            raise
        raise InputError(
            f"capture: expected a function that only enqueues work on the current stream, got one "
            f"that ended the capture: {exc}. Leave out capture=True, or remove all calls that wait "
            f"for the GPU or read from it."
        ) from exc
    return partial(graph.launch, stream)
