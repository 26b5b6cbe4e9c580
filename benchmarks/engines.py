"""What moves a tile between two GPUs quickest: copy engines or kernels, pulling or pushing.

    python benchmarks/engines.py --size 131072 --json engines.json

One process, all GPUs at once, in stage order: GPU r takes its tile of GPU (r + s) mod n at stage s,
as the workers of a cluster do. "no transpose" are plain copies, the limit of what transposes. Each
transpose is compared with what CuPy makes of the same tiles. Rates count the bytes that one GPU
receives from the others, over the time of the slowest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dask_p2p.environment import environment
from dask_p2p.kernels import kernel_named

REPEATS = 5
DEFAULT_KIND = 4  # cudaMemcpyDefault
ITEM_BYTES = 4

#: Starts the move of a tile on a stream of the reader: reader, holder, and the tile's number.
Engine = Callable[[int, int], None]


class Exchange:
    """A square matrix in one row slab a GPU, and the slabs of its transpose."""

    def __init__(self, size: int, gpus: int) -> None:
        import cupy

        self.cupy = cupy
        self.runtime = cupy.cuda.runtime
        self.gpus, self.rows, self.size = gpus, size // gpus, size
        self.kernel = kernel_named("cupy")
        self.src: list[Any] = []
        self.dst: list[Any] = []
        self.streams: list[Any] = []
        for gpu in range(gpus):
            with cupy.cuda.Device(gpu):
                for peer in set(range(gpus)) - {gpu}:
                    self.runtime.deviceEnablePeerAccess(peer)
                slab = cupy.arange(self.rows * size, dtype="u4").reshape(self.rows, size)
                slab += gpu * self.rows * size & 0xFFFFFFFF
                self.src.append(slab)
                self.dst.append(cupy.empty_like(slab))
                self.streams.append(cupy.cuda.Stream(non_blocking=True))

    def tiles(self, reader: int, holder: int) -> tuple[Any, Any]:
        """Return where the holder's tile for the reader lies, and where it goes."""
        rows = self.rows
        src = self.src[holder][:, reader * rows : (reader + 1) * rows]
        return src, self.dst[reader][:, holder * rows : (holder + 1) * rows]

    # --- engines ---

    def copy_contiguous(self, reader: int, holder: int) -> None:
        """Copy as many bytes as a tile has, in one piece."""
        offset_bytes = self.rows * self.rows * ITEM_BYTES
        with self.cupy.cuda.Device(reader):
            self.runtime.memcpyAsync(
                self.dst[reader].data.ptr + holder * offset_bytes,
                self.src[holder].data.ptr + reader * offset_bytes,
                offset_bytes,
                DEFAULT_KIND,
                self.streams[reader].ptr,
            )

    def copy_rows(self, reader: int, holder: int) -> None:
        """Copy the rows of a tile, to where rows would go."""
        src, dst = self.tiles(reader, holder)
        run_bytes = self.rows * ITEM_BYTES
        with self.cupy.cuda.Device(reader):
            self.runtime.memcpy2DAsync(
                dst.data.ptr, dst.strides[0], src.data.ptr, src.strides[0],
                run_bytes, self.rows, DEFAULT_KIND, self.streams[reader].ptr,
            )  # fmt: skip

    def pull(self, reader: int, holder: int) -> None:
        """Have a kernel of the reader read the holder's memory."""
        src, dst = self.tiles(reader, holder)
        self.kernel.permute_into(dst, src, (1, 0), stream=self.streams[reader])

    def push(self, reader: int, holder: int) -> None:
        """Have a kernel of the holder write the reader's memory."""
        src, dst = self.tiles(reader, holder)
        # The kernel runs where its target is said to be: give it the same memory as the holder's.
        there = self.cupy.cuda.UnownedMemory(dst.data.ptr, dst.nbytes, self.dst[reader], holder)
        pointer = self.cupy.cuda.MemoryPointer(there, 0)
        target = self.cupy.ndarray(dst.shape, dst.dtype, pointer, dst.strides)
        self.kernel.permute_into(target, src, (1, 0), stream=self.streams[holder])

    # --- measuring ---

    def time_s(self, engine: Engine, in_step: bool = True) -> float:
        """Return how long the exchange takes on the slowest GPU; the median of a few."""
        times_s = []
        for _ in range(REPEATS + 1):
            events = []
            self.synchronize()
            for gpu in range(self.gpus):
                with self.cupy.cuda.Device(gpu):
                    events.append((self.cupy.cuda.Event(), self.cupy.cuda.Event()))
                    events[gpu][0].record(self.streams[gpu])
            for stage in range(1, self.gpus):
                for reader in range(self.gpus):
                    # Out of step all readers go to the holders in the same order.
                    others = [gpu for gpu in range(self.gpus) if gpu != reader]
                    in_turn = (reader + stage) % self.gpus
                    engine(reader, in_turn if in_step else others[stage - 1])
            for gpu in range(self.gpus):
                with self.cupy.cuda.Device(gpu):
                    events[gpu][1].record(self.streams[gpu])
            self.synchronize()
            elapsed_ms = [self.cupy.cuda.get_elapsed_time(*pair) for pair in events]
            times_s.append(max(elapsed_ms) / 1e3)
        return median(times_s[1:])

    def wrong(self) -> int:
        """Count the elements of tiles of other GPUs that are not where they belong."""
        wrong = 0
        for reader in range(self.gpus):
            with self.cupy.cuda.Device(reader):
                for holder in set(range(self.gpus)) - {reader}:
                    src, dst = self.tiles(reader, holder)
                    for first in range(0, self.rows, 1024):
                        band = self.cupy.ascontiguousarray(src[first : first + 1024])
                        wrong += int((dst[:, first : first + 1024] != band.T).sum())
        return wrong

    def clear(self) -> None:
        """Overwrite the results."""
        for gpu in range(self.gpus):
            with self.cupy.cuda.Device(gpu):
                self.dst[gpu][...] = 0xFFFFFFFF

    def synchronize(self) -> None:
        """Wait for all GPUs."""
        for gpu in range(self.gpus):
            with self.cupy.cuda.Device(gpu):
                self.runtime.deviceSynchronize()


@click.command()
@click.option("--gpus", type=int, default=None, help="Default: all.")
@click.option("--size", default=65536, help="Rows and columns, of 4 bytes each.")
@click.option("--commit", default=None, help="Of the code, where it cannot be asked of git.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), default=None)
def main(gpus: int | None, size: int, commit: str | None, path: Path | None) -> None:
    """Measure each engine, print a table, write JSON."""
    import cupy

    exchange = Exchange(size, gpus or cupy.cuda.runtime.getDeviceCount())
    received_bytes = (exchange.gpus - 1) * exchange.rows**2 * ITEM_BYTES
    engines: list[tuple[str, Engine, bool, bool]] = [
        ("copy engine, contiguous, no transpose", exchange.copy_contiguous, True, False),
        ("copy engine, rows, no transpose", exchange.copy_rows, True, False),
        ("kernel, pull", exchange.pull, True, True),
        ("kernel, push", exchange.push, True, True),
        ("kernel, pull, out of step", exchange.pull, False, True),
        ("kernel, push, out of step", exchange.push, False, True),
    ]
    rows = []
    for name, engine, in_step, transposes in engines:
        exchange.clear()
        time_s = exchange.time_s(engine, in_step)
        wrong = exchange.wrong() if transposes else None
        rows.append(
            {"engine": name, "time_s": time_s, "link_gbs": received_bytes / time_s / 1e9}
            | {"wrong": wrong}
        )
    table = Table(title=f"{exchange.gpus} GPUs, {size} x {size} x {ITEM_BYTES} bytes")
    for column in ("engine", "ms", "GB/s a GPU", "of the first", "wrong"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for made in rows:
        table.add_row(
            made["engine"],
            f"{made['time_s'] * 1e3:.2f}",
            f"{made['link_gbs']:.0f}",
            f"{made['link_gbs'] / rows[0]['link_gbs']:.0%}",
            "" if made["wrong"] is None else str(made["wrong"]),
        )
    Console(width=100).print(table)
    if path is not None:
        report = {"gpus": exchange.gpus, "size": size, "rows": rows, **environment()}
        if commit is not None:
            report["commit"] = commit
        path.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
