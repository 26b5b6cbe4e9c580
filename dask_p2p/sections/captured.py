"""Steps of an iteration as a graph of a GPU, which is tried before it is used."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.sections.devices import Gpu
from dask_p2p.sections.halo import Padded
from dask_p2p.types import Array

# Pools of memory for graphs, by device. They are never dropped: what a function that raised has
# allocated goes later, and CuPy crashes where the garbage collector finds a pool and its memory
# together.
_pools: defaultdict[int, list[Any]] = defaultdict(list)
_lock = threading.Lock()


class Captured:
    """Steps that are done again and again without their function.

    What a function does otherwise than on its stream is in no graph, nor what it takes from
    anywhere but its arguments. So the graph is run once on the fields as they are; these are then
    put back, the same steps done by the function, and what both have made compared.

    Parameters
    ----------
    device : Gpu
        Where the fields lie.
    fields : sequence of Padded
        The fields now, which the steps are for.
    steps : callable
        Puts steps on the stream that leave each field in the memory where it was.

    Raises
    ------
    InputError
        If a graph cannot have these steps.
    """

    def __init__(self, device: Gpu, fields: Sequence[Padded], steps: Callable[[], None]) -> None:
        self._device = device
        self._replay = _graph(device, steps)
        before = [field.data.copy() for field in fields]
        self._replay()
        self._tried = [field.inner.copy() for field in fields]
        for field, data in zip(fields, before, strict=True):
            field.data[...] = data

    def __call__(self) -> None:
        """Put the steps on the stream once more."""
        self._replay()

    def check(self, fields: Sequence[Padded]) -> None:
        """Compare what the graph has made with what the function made of the same.

        Raises
        ------
        InputError
            If that differs.
        """
        for field, tried in zip(fields, self._tried, strict=True):
            same = self._count(tried.view(np.uint8) == field.inner.copy().view(np.uint8))
            if same < tried.nbytes:
                raise InputError(
                    f"capture: expected a function that does the same in each step, all of it on "
                    f"the current stream, got one whose captured steps gave {tried.nbytes - same} "
                    f"of {tried.nbytes} bytes otherwise than its own. Leave out capture=True, or "
                    f"what counts steps, draws random numbers, or uses other streams."
                )
        self._tried = []

    def _count(self, array: Array) -> int:
        return int(self._device.module.count_nonzero(array))


def _graph(gpu: Gpu, work: Callable[[], None]) -> Callable[[], None]:
    """Return what puts on the stream, in one call, all that `work` puts there: a graph.

    Nothing of it is done now. It has the addresses of arrays that there are now; what `work`
    allocates stays until the section ends. `InputError` if a graph cannot have it.
    """
    cuda, stream = gpu.module.cuda, gpu.stream
    pools = _pools[cuda.runtime.getDevice()]
    with _lock:
        pool = pools.pop() if pools else cuda.MemoryPool()
    gpu.closing.append(partial(pools.append, pool))
    gpu.closing.append(pool.free_all_blocks)  # which is called before
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
    except RuntimeError as exc:  # of CUDA; or of CuPy, which refuses some calls itself
        if not isinstance(exc, cuda.runtime.CUDARuntimeError) and "captur" not in str(exc):
            raise
        raise InputError(
            f"capture: expected a function that puts work on the current stream and does nothing "
            f"else, got one that ends a capture by {exc}. Leave out what waits for the GPU or "
            f"reads from it, or capture=True."
        ) from exc
    return partial(graph.launch, stream)
