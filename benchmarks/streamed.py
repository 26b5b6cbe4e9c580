"""Wave steps on fields in host memory that go through one GPU, compared with steps in core.

    python -m benchmarks.streamed --gib 16 --workers 1
    python -m benchmarks.streamed --cpu --gib 0.02 --core-gib 0.02 --side 64 --visit 0 --most 8

The wave is that of `benchmarks.sections_gpu`: a 25-point stencil in float32 with two time levels.
Values of a small array are first compared with those in core, bit for bit. The bus is measured by
copies of pinned memory in and out at the same time. The time of a step is the difference between a
long and a short run, divided by the number of steps between them. The bound of a step is the larger
of bus and kernel: both levels go in and out once in a visit.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import dask.array as da
import numpy as np
from distributed import Client, wait

import dask_p2p
from benchmarks.environment import environment
from benchmarks.growth import write
from benchmarks.rivals.wave import RADIUS, wave

__all__ = ["main"]

_COPIED_BYTES = 1 << 30
_LEVELS = 2
_DEPTH: Any = [{0: RADIUS}, 0]


def bus_gb_s() -> float:
    """Return the bytes in one direction each second, while as many go in the other one."""
    import cupy

    hosts = [cupy.cuda.alloc_pinned_memory(_COPIED_BYTES) for _ in range(2)]
    memory = [cupy.empty(_COPIED_BYTES, cupy.uint8) for _ in range(2)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    copy, kind, seconds = cupy.cuda.runtime.memcpyAsync, 4, []
    for _ in range(4):
        cupy.cuda.runtime.deviceSynchronize()
        start_s = time.perf_counter()
        for _ in range(4):
            copy(memory[0].data.ptr, hosts[0].ptr, _COPIED_BYTES, kind, streams[0].ptr)
            copy(hosts[1].ptr, memory[1].data.ptr, _COPIED_BYTES, kind, streams[1].ptr)
        cupy.cuda.runtime.deviceSynchronize()
        seconds.append(time.perf_counter() - start_s)
    return 4 * _COPIED_BYTES / min(seconds) / 1e9


def kernel_s(shape: tuple[int, int, int], repeats: int = 20) -> float:
    """Return the seconds of a step of the kernel alone."""
    import cupy

    u = cupy.zeros((shape[0] + 2 * RADIUS, *shape[1:]), np.float32)
    before, out = (cupy.zeros(shape, np.float32) for _ in range(2))
    wave(u, before, out)
    cupy.cuda.runtime.deviceSynchronize()
    start_s = time.perf_counter()
    for _ in range(repeats):
        wave(u, before, out)
    cupy.cuda.runtime.deviceSynchronize()
    return (time.perf_counter() - start_s) / repeats


def field(shape: tuple[int, ...], workers: int, on_gpu: bool) -> Any:
    """Return a Dask array with a slab for each worker."""
    chunks = tuple(-(-n // workers) if axis == 0 else n for axis, n in enumerate(shape))
    if not on_gpu:
        return da.full(shape, 0.25, dtype=np.float32, chunks=chunks)
    return da.full(shape, 0.25, dtype=np.float32, chunks=chunks).map_blocks(_to_gpu)


def _to_gpu(block: Any) -> Any:
    import cupy

    return cupy.asarray(block)


def are_equal(workers: int, is_on_gpu: bool) -> bool:
    """Return whether streamed values have the bits of values in core."""
    u = np.random.default_rng(0).random((96, 32, 40), dtype=np.float32)
    chunks: Any = (-(-96 // workers), 32, 40)
    options: dict[str, Any] = {"steps": 9, "ranks": workers}
    x = da.from_array(u, chunks=chunks)
    sizes: dict[str, Any] = {"on_gpu": "stream", "steps_per_visit": 2, "slab_rows": 12}
    streamed: Any = dask_p2p.iterate(wave, (x, x), depth=_DEPTH, **options, **sizes)
    x = x.map_blocks(_to_gpu) if is_on_gpu else x
    in_core: Any = dask_p2p.iterate(wave, (x, x), depth=_DEPTH, **options)
    pairs = zip(da.compute(*streamed), da.compute(*map(_on_host, in_core)), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


def _on_host(x: Any) -> Any:
    return x.map_blocks(lambda block: block.get() if hasattr(block, "get") else block)


def step_s(x: Any, steps: tuple[int, int], client: Any, **options: Any) -> float:
    """Return the seconds of a step of `iterate`, by a short and a long run after a first one."""
    x = client.persist(x)
    wait(x)
    seconds = []
    for count in (steps[0], *steps):
        newest, _ = dask_p2p.iterate(
            wave, (x, x), depth=_DEPTH, steps=count, checkpoint_every=None, **options
        )
        start_s = time.perf_counter()
        # One element: the client does not gather the fields.
        client.compute(newest[:1, :1, :1]).result()
        seconds.append(time.perf_counter() - start_s)
        del newest
    return (seconds[2] - seconds[1]) / (steps[1] - steps[0])


def refuse_pinned_memory() -> None:
    """Make this worker's memory pageable, as where a system does not allow to pin it."""
    from dask_p2p.sections.iterate import streaming

    def refuse(owner: Any, memory: Any) -> None:
        raise MemoryError("pinned memory is refused for this measurement")

    vars(streaming)["pin_while"] = refuse


@click.command(context_settings={"show_default": True})
@click.option("--gib", default=16.0, help="Both levels of the streamed fields, of all workers.")
@click.option("--core-gib", default=4.0, help="The same of fields that fit into the GPUs; 0: none.")
@click.option("--side", default=1024, help="Length of the second and third axis.")
@click.option("--workers", default=1, help="Workers with a GPU each.")
@click.option("--visit", "visits", multiple=True, type=int, default=(0, 1, 4, 16))
@click.option("--most", default=32, help="Steps of the short runs, for visits of 0: chosen.")
@click.option("--rows", type=int, help="Rows of a slab.  [default: chosen]")
@click.option("--pageable", is_flag=True, help="Refuse pinned memory.")
@click.option("--cpu", "on_cpu", is_flag=True, help="Use NumPy, to try the program.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    gib: float, core_gib: float, side: int, workers: int, visits: tuple[int, ...], most: int,
    rows: int | None, pageable: bool, on_cpu: bool, path: Path | None,
) -> None:  # fmt: skip
    """Time wave steps on fields in host memory, and print a table."""

    def shape_of(size_gib: float) -> tuple[int, int, int]:
        return round(size_gib * 2**30 / (4 * _LEVELS * side**2)), side, side

    with dask_p2p.local_cluster(workers, gpus=not on_cpu) as cluster, Client(cluster) as client:
        dask_p2p.register(client)
        if pageable:
            client.run(refuse_pinned_memory)
        print(f"values equal those in core: {are_equal(workers, not on_cpu)}", flush=True)
        first = next(iter(client.scheduler_info()["workers"]))
        bus = kernel = 0.0
        if not on_cpu:
            bus = client.submit(bus_gb_s, workers=first, pure=False).result()
            part = 512, side, side
            kernel = client.submit(kernel_s, part, workers=first, pure=False).result() / 512
            print(f"bus {bus:.1f} GB/s each way; kernel {kernel * 1e6:.2f} us a row", flush=True)
        table: list[dict[str, Any]] = []

        def add(name: str, size_gib: float, visit: int | None, seconds: float) -> None:
            local_rows = shape_of(size_gib)[0] / workers
            copy_s = _LEVELS * 4 * side**2 * local_rows / (bus * 1e9) if bus else 0.0
            bound_s = max(copy_s / (visit or most), kernel * local_rows)
            row = {"name": name, "gib": size_gib, "steps_per_visit": visit, "step_s": seconds}
            table.append({**row, "copy_s": copy_s, "kernel_s": kernel * local_rows})
            print(
                f"{name}, {size_gib:g} GiB, {visit or 'chosen'} steps a visit: "
                f"{seconds * 1e3:.2f} ms a step; kernel {kernel * local_rows * 1e3:.2f} ms, "
                f"bus {copy_s * 1e3:.1f} ms; {seconds / (bound_s or seconds):.2f} of the bound",
                flush=True,
            )
            about = {"bus_gb_s": bus, "workers": workers, "side": side, "pageable": pageable}
            write(path, {**environment(), **about, "rows": table})

        streamed: dict[str, Any] = {"ranks": workers, "on_gpu": "stream", "slab_rows": rows}
        if core_gib:
            core, steps = shape_of(core_gib), (2 * 256, 10 * 256) if not on_cpu else (8, 24)
            seconds = step_s(field(core, workers, not on_cpu), steps, client, ranks=workers)
            add("in core", core_gib, steps[1], seconds)
            seconds = step_s(field(core, workers, False), steps, client, **streamed)
            add("streamed", core_gib, None, seconds)
        for visit in visits:
            steps = (2 * visit, 8 * visit) if visit else (most, 9 * most)
            sizes = {"steps_per_visit": visit or None}
            field_x = field(shape_of(gib), workers, False)
            seconds = step_s(field_x, steps, client, **streamed, **sizes)
            add("streamed", gib, visit or None, seconds)


if __name__ == "__main__":
    main()
