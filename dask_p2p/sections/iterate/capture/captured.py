"""Steps of an iteration as a CUDA graph, which is verified before it is used."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.sections.exchange.halo import HaloArray
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.types import Array

# Memory pools for graphs, by device. They are never dropped: memory of a function that raised is
# freed later, and CuPy crashes if the garbage collector finds a pool and its memory together.
_pools: defaultdict[int, list[Any]] = defaultdict(list)
_lock = threading.Lock()


class Captured:
    """Steps that are replayed as a CUDA graph, without calls of their function.

    A graph misses all work that the function does outside its stream, and every change of a value
    other than its arguments. So `rehearse` runs the graph once on the current fields, and restores
    them. The function then does the same steps, and `difference` compares both results.

    Parameters
    ----------
    device : Gpu
        The GPU of the fields.
    fields : sequence of HaloArray
        The current fields, on which the steps operate.
    steps : callable
        Enqueues the steps. After them each field is in the memory where it was.

    Raises
    ------
    InputError
        If the steps cannot be captured.
    """

    def __init__(self, device: Gpu, fields: Sequence[HaloArray], steps: Callable[[], None]) -> None:
        self._device, self._fields = device, fields
        self._replay = _graph(device, steps)
        # Before other ranks wait for this one: there may be no memory.
        self._before = [field.data.copy() for field in fields]
        self._tried = [field.inner.copy() for field in fields]

    def rehearse(self) -> None:
        """Run the graph once, keep its results, and restore the fields: a call of all ranks."""
        for field, before in zip(self._fields, self._before, strict=True):
            before[...] = field.data
        self._replay()
        for field, tried in zip(self._fields, self._tried, strict=True):
            tried[...] = field.inner
        for field, before in zip(self._fields, self._before, strict=True):
            field.data[...] = before
        self._before = []

    def __call__(self) -> None:
        """Enqueue the steps once more."""
        self._replay()

    def difference(self) -> str:
        """Return a text if the function's results of the same steps differ; "" if they do not."""
        fields, tried = self._fields, self._tried
        self._fields = self._tried = []
        for field, found in zip(fields, tried, strict=True):
            same = self._count(found.view(np.uint8) == field.inner.copy().view(np.uint8))
            if same < found.nbytes:
                return f"{found.nbytes - same} of {found.nbytes} bytes"
        return ""

    def _count(self, array: Array) -> int:
        return int(self._device.module.count_nonzero(array))


def _graph(gpu: Gpu, work: Callable[[], None]) -> Callable[[], None]:
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
