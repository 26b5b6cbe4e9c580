"""Times of an array in host memory through one GPU: as a whole, in parts, by `map_on_gpu`.

    python -m benchmarks.streams --megabytes 16 --megabytes 4096 --json FILE

The first ways follow M. Harris, "How to Overlap Data Transfers in CUDA C/C++", and G. Ruetsch and
M. Fatica for CUDA Fortran. An array of pinned memory goes to the GPU, through a function and back:
as a whole; in four parts on four streams, queued part by part or kind by kind; or in 32 parts. The
other ways use `map_on_gpu` with Dask arrays of eight blocks on one worker. Each way runs twice, and
the second run is timed: outputs reuse the first run's memory, as in a chain of calls. Only "all
new" releases that memory first. The first result of each way is checked. The program needs a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import dask.array as da
import numpy as np
from distributed import Client, wait

import dask_p2p
from benchmarks.environment import environment
from benchmarks.growth import write
from dask_p2p.backends import host as host_copies
from dask_p2p.backends import host as host_threads
from dask_p2p.backends.device import gpu_obstacle
from dask_p2p.backends.host_memory import Pinned
from dask_p2p.engine.task import PLUGIN_NAME

__all__ = ["by_kind", "by_part", "main"]

_STREAMS = 4  # as in the article
_PARTS = 32
_BLOCKS = 8
SEQUENTIAL, BY_PART, BY_KIND = "one after the other", "parts, part by part", "parts, kind by kind"
MANY_PARTS = "32 parts, part by part"
PINNED, PAGEABLE = "map_on_gpu, pinned", "map_on_gpu, pageable"
FIRST = "map_on_gpu, pageable, all new"
REGISTERED, USERS = "map_on_gpu, pinned where it lies", "asarray, function, asnumpy"
_SETTLE_S = 0.2  # enough for workers to release results
_AS_IT_IS = host_threads._MOST, host_copies._FEW_THREADS

Issued = Iterator[tuple[str, int]]


def function(a: Any) -> Any:
    """Return the result of the function that the array is sent through."""
    return a * 2 + 1


def by_part(count: int) -> Issued:
    """Yield operations in the order of parts: all of one part, then the next part.

    >>> list(by_part(2))
    [('up', 0), ('run', 0), ('down', 0), ('up', 1), ('run', 1), ('down', 1)]
    """
    for part in range(count):
        for action in ("up", "run", "down"):
            yield action, part


def by_kind(count: int) -> Issued:
    """Yield operations by kind, all copies up first: better with one copy engine.

    >>> list(by_kind(2))
    [('up', 0), ('up', 1), ('run', 0), ('run', 1), ('down', 0), ('down', 1)]
    """
    for action in ("up", "run", "down"):
        for part in range(count):
            yield action, part


class Issuer:
    """Queues copies and the function on streams, one for each part.

    Parameters
    ----------
    source, out : numpy.ndarray
        One-dimensional, in pinned memory.
    work : callable
        Function of an array on the device.
    """

    def __init__(self, source: Any, out: Any, work: Callable[[Any], Any]) -> None:
        import cupy

        self._cupy, self._source, self._out, self._work = cupy, source, out, work
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(_STREAMS)]
        self._memory = cupy.empty(source.shape, source.dtype)
        cupy.cuda.Stream.null.synchronize()

    def run(self, issued: Issued, count: int) -> None:
        """Queue the operations of `count` parts in this order, and wait for their end."""
        copy = self._cupy.cuda.runtime.memcpyAsync
        size = -(-self._source.size // count)
        results: dict[int, Any] = {}
        for action, number in issued:
            part = slice(number * size, (number + 1) * size)
            stream = self._streams[number % _STREAMS]
            host, memory = self._source[part], self._memory[part]
            with stream:
                if action == "up":
                    copy(memory.data.ptr, host.ctypes.data, host.nbytes, 4, stream.ptr)
                elif action == "run":
                    results[number] = self._work(memory)
                else:
                    result, to = results[number], self._out[part]
                    copy(to.ctypes.data, result.data.ptr, result.nbytes, 4, stream.ptr)
        for stream in self._streams:
            stream.synchronize()


def pinned(values: Any) -> Any:
    """Return a copy in pinned memory."""
    memory = np.asarray(Pinned(values.nbytes))[: values.nbytes].view(values.dtype)
    memory[...] = values
    return memory


def issuing(size: int) -> dict[str, Callable[[], float]]:
    """Return functions that time each way without Dask, on `size` float32 in pinned memory."""
    values = np.arange(size, dtype="f4")
    source, out = pinned(values), pinned(np.zeros_like(values))
    issuer = Issuer(source, out, function)

    def way(order: Callable[[int], Issued], count: int) -> Callable[[], float]:
        def check(_: Any) -> bool:
            return bool((out == function(values)).all())

        def prepare() -> None:
            out[:1] = out[-1:] = 0

        return _measuring(lambda: issuer.run(order(count), count), check, prepare)

    return {
        SEQUENTIAL: way(by_kind, 1),
        BY_PART: way(by_part, _STREAMS),
        BY_KIND: way(by_kind, _STREAMS),
        MANY_PARTS: way(by_part, _PARTS),
    }


def mapping(
    client: Any, size: int, threads: Sequence[int] = (), fallback: str | None = None
) -> dict[str, Callable[[], float]]:
    """Return functions that time each way with Dask, from `persist` to `wait`."""
    x = client.persist(da.arange(size, dtype="f4", chunks=-(-size // _BLOCKS)))

    def on_gpu(x_block: Any, by: Callable[..., Any] = function) -> Any:
        return dask_p2p.map_on_gpu(by, x_block, dtype="f4", fallback=fallback)

    def by_users() -> Any:
        import cupy

        return x.map_blocks(cupy.asarray).map_blocks(function).map_blocks(cupy.asnumpy)

    same = client.persist(on_gpu(x, by=unchanged))  # its blocks lie in pinned memory
    pageable = {PAGEABLE: _AS_IT_IS, REGISTERED: (1, 2)}
    pageable |= {f"{PAGEABLE}, {count} thread(s)": (count, 0) for count in threads}
    measure = partial(_of_dask, client, expected=function(x))
    return {
        PINNED: measure(partial(on_gpu, same)),
        FIRST: measure(partial(on_gpu, x), before=partial(_forget_all, client)),
        USERS: measure(by_users),
        **{
            way: measure(partial(on_gpu, x), before=partial(client.run, _fill_by, *counts))
            for way, counts in pageable.items()
        },
    }


def _fill_by(thread_limit: int, pin_limit: int) -> None:
    """Set the number of threads that fill slots; with less than `pin_limit`, blocks are pinned."""
    host_threads._MOST, host_copies._FEW_THREADS = thread_limit, pin_limit
    host_threads.thread_count.cache_clear()
    host_threads.pool.cache_clear()


def _forget_all(client: Any) -> None:
    """Release all workers' memory of freed results, and reset the threads that fill slots."""
    held_bytes = -1
    while (now_bytes := sum(client.run(_forget).values())) != held_bytes:
        held_bytes = now_bytes
        time.sleep(_SETTLE_S)


def _forget(dask_worker: Any) -> int:
    """Release a worker's unused pinned memory; return the pinned bytes of existing arrays."""
    _fill_by(*_AS_IT_IS)
    pinned = dask_worker.plugins[PLUGIN_NAME].context.pinned
    pinned.clear()
    return int(pinned.pinned_bytes)


def unchanged(a: Any) -> Any:
    """Return the argument."""
    return a


def _of_dask(
    client: Any,
    make: Callable[[], Any],
    expected: Any,
    before: Callable[[], Any] = lambda: None,
) -> Callable[[], float]:
    def run() -> Any:
        y = client.persist(make())
        wait(y)
        return y

    def prepare() -> None:
        """Wait until the previous result, which has the same name, is released."""
        name = make().name
        while client.run_on_scheduler(_has_tasks, name):
            time.sleep(0.001)
        before()

    return _measuring(run, lambda y: not (y != expected).any().compute(), prepare)


def _has_tasks(name: str, dask_scheduler: Any) -> bool:
    return name in dask_scheduler.task_groups


def _measuring(
    run: Callable[[], Any], check: Callable[[Any], bool], prepare: Callable[[], None]
) -> Callable[[], float]:
    """Return a function that runs and returns the seconds; it checks the first result."""
    unchecked = [check]

    def measure() -> float:
        prepare()
        start_s = time.perf_counter()
        result = run()
        elapsed_s = time.perf_counter() - start_s
        if unchecked and not unchecked.pop()(result):
            raise click.ClickException("values are wrong")
        return elapsed_s

    return measure


@click.command(context_settings={"show_default": True})
@click.option(
    "--megabytes", "sizes", multiple=True, type=int, default=(16, 1024), help="Size, MiB."
)
@click.option("--repeats", default=7, help="Rounds after the first.")
@click.option("--threads", multiple=True, type=int, help="Threads that fill slots; repeatable.")
@click.option("--only", default="", help="Only ways with this text in their names.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    sizes: Sequence[int], repeats: int, threads: Sequence[int], only: str, path: Path | None
) -> None:
    """Time an array of float32 in host memory through a GPU and back."""
    if (obstacle := gpu_obstacle()) is not None:
        raise click.ClickException(
            f"this benchmark needs a GPU, and there is none: {obstacle}. Run it on a machine with "
            f"a GPU."
        )
    rows = []
    with dask_p2p.local_cluster(1, gpus=True) as cluster, Client(cluster) as client:
        for megabytes in sizes:
            size = megabytes * 2**18
            measured = issuing(size) | mapping(client, size, threads)
            measured = {way: measure for way, measure in measured.items() if only in way}
            times: dict[str, list[float]] = {way: [] for way in measured}
            for repeat in range(repeats + 1):
                for way, measure in measured.items():
                    measure()
                    elapsed_s = measure()
                    if repeat:
                        times[way].append(elapsed_s)
            for way, times_s in times.items():
                gbs = 8 * size / median(times_s) / 1e9
                print(f"{megabytes:>6} MiB {way:>33}: {median(times_s) * 1e3:9.3f} ms, ", end="")
                print(f"{gbs:6.1f} GB/s both ways", flush=True)
            rows.append({"megabytes": megabytes, "times_s": times})
    write(path, {**environment(), "repeats": repeats, "rows": rows})


if __name__ == "__main__":
    main()
