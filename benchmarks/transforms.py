"""Fourier transforms of an array in slabs, by this package, Dask and others.

    python -m benchmarks.transforms
    python -m benchmarks.transforms --gpus --workers 2

The program prints how much values differ from NumPy's in double precision.
`benchmarks.redistributions` measures the times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
import dask.array as da
import numpy as np
from dask.array import fft as dask_fft

from benchmarks.measure import Case, Way, no_op
from benchmarks.options import choose_cluster, start
from benchmarks.report import NO_OP
from benchmarks.rivals import jax_fft, mpi_fftn
from benchmarks.tables import OURS, output, table
from dask_p2p import fft
from dask_p2p.cli import COUNT, one_line_errors
from dask_p2p.geometry import split_evenly
from dask_p2p.plans import Plan, redistribution

DASK = "dask "  # prefix of Dask's own ways
_TOLERANCE = 4500  # units in the last place of the largest value
_CHECKED_BYTES = 2**32  # bytes of a worker's input that are checked at a time
_AT_ONCE = 5  # arrays of the input's size in memory: input, in transit, result, work area
_USUAL_SHARE = 0.6  # part of the workers' memory
_SHAPES = ((64,) * 3, (2**20,), (999_983,), (3 * 5 * 7 * 11 * 13,))  # 999,983 is a prime


@dataclass(frozen=True, slots=True)
class Spectrum(Case):
    """An array in slabs, transformed along all axes into slabs of another axis."""

    reach: float = 2.0  # required speed relative to the faster of Dask's ways

    @property
    def is_real(self) -> bool:
        """True for real input, for which half of the spectrum is made."""
        return self.dtype.kind == "f"

    def is_usual(self, memory_bytes: int) -> bool:
        """Return true if the array is small enough to be measured by default."""
        return _AT_ONCE * self.size_bytes <= _USUAL_SHARE * memory_bytes

    def ways(self, on_gpus: bool) -> dict[str, Way]:
        """Return the ways to measure, by name; on GPUs JAX instead of Dask's p2p and MPI."""
        p2p_transform, workers = fft.rfftn if self.is_real else fft.fftn, len(self.chunks[0])
        ways = {
            OURS: Way(lambda x, _: p2p_transform(x), required=True),
            NO_OP: Way(no_op, checked=False),
            f"{DASK}tasks": Way(lambda x, _: self.by_rechunk(x, "tasks")),
        }
        if on_gpus:
            remaining_s: list[float] = []
            arguments = self.shape, self.is_real, workers, remaining_s
            ways[jax_fft.WAY] = Way(lambda *_: jax_fft.seconds(*arguments))
        else:
            ways[f"{DASK}p2p"] = Way(lambda x, _: self.by_rechunk(x, "p2p"))
            ways[mpi_fftn.WAY] = Way(lambda *_: mpi_fftn.seconds(self, workers))
        return ways

    def by_rechunk(self, x: Any, method: str) -> Any:
        """Return a Dask user's code: transform unchunked axes, rechunk, transform the other."""
        transform = dask_fft.rfftn if self.is_real else dask_fft.fftn
        return self._along_the_first(transform(x, axes=(1, 2)), method)

    def _along_the_first(self, half: Any, method: str) -> Any:
        parts = split_evenly(self.shape[1], len(self.chunks[0]))
        return dask_fft.fft(half.rechunk({0: -1, 1: parts}, method=method), axis=0)

    def settle(self, client: Any) -> float:
        """Wait for the GPUs: the last tasks of all ways end when their kernels are queued.

        The workers return the time of the end, and all processes share one host's clock, so the
        reply's travel time does not count.
        """
        done_s = client.run(_synchronize).values() if self.kind == "cupy" else ()
        return max(done_s, default=0.0)

    def plan(self, y: Any) -> Plan:
        """Return the plan of a result, where a complex number counts as two real ones."""
        columns = (y.shape[2] * (2 if self.is_real else 1),)
        before, after = (*self.chunks[:2], columns), (*y.chunks[:2], columns)
        return redistribution(before, self.axes, after)

    def count_wrong(self, y: Any) -> int:
        """Count the elements that differ from Dask's; large arrays go by ranges of columns."""
        x, workers = self.make(), len(self.chunks[0])
        # No element is negative, so the spectrum's first element, their sum, is the largest.
        largest = float(da.abs(x).sum(dtype="f8").compute())
        tolerance = _TOLERANCE * float(np.finfo(self.dtype).eps) * largest
        parts = -(-self.size_bytes // workers // _CHECKED_BYTES)
        count = 0
        for columns in np.array_split(np.arange(y.shape[2]), parts):
            place = (..., slice(columns[0], columns[-1] + 1))
            last = (dask_fft.rfft if self.is_real else dask_fft.fft)(x, axis=2)
            expected = self._along_the_first(dask_fft.fft(last[place], axis=1), "tasks")
            is_right = da.abs(y[place] - expected) <= tolerance  # false for NaN
            count += int((~is_right).sum().compute())
        return count


def _synchronize() -> float:
    import cupy

    cupy.cuda.Device().synchronize()
    return time.time()


def transforms(workers: int, kind: str) -> Iterator[Spectrum]:
    """Yield the cases."""

    def case(shape: tuple[int, ...], dtype: str, name: str) -> Spectrum:
        partition = (split_evenly(shape[0], workers), (shape[1],), (shape[2],))
        return Spectrum(shape, partition, (0, 1, 2), np.dtype(dtype), kind, name)

    if kind == "numpy":
        yield case((256,) * 3, "c16", "fftn, 256 cubed")
        return
    yield case((1024,) * 3, "c8", "fftn, 1024 cubed")
    yield case((1024,) * 3, "f4", "rfftn, 1024 cubed")
    yield case((2048, 2048, 1024), "c8", "fftn, 2048 x 2048 x 1024")  # 32 GiB


def error(shape: tuple[int, ...], dtype: Any, workers: int, kind: str) -> float:
    """Return the largest difference of `fftn` from NumPy, relative to the largest value."""
    rng, chunks = da.random.default_rng(0), (-(-shape[0] // workers), *shape[1:])
    parts = (rng.standard_normal(shape, chunks=chunks) for _ in range(2))
    x = (next(parts) + 1j * next(parts)).astype(dtype)
    if kind == "cupy":
        import cupy

        y = fft.fftn(x.map_blocks(cupy.asarray)).map_blocks(cupy.asnumpy, dtype=dtype)
    else:
        y = fft.fftn(x)
    expected = np.fft.fftn(x.compute().astype("c16"))
    return float(abs(y.compute() - expected).max() / abs(expected).max())


@click.command(context_settings={"show_default": True})
@click.option("--gpus", is_flag=True, help="Use GPUs instead of CPU workers.")
@click.option("--workers", type=COUNT, help="[default: one for each GPU, else 4]")
def main(gpus: bool, workers: int | None) -> None:
    """Print the difference from NumPy in double precision, relative to the largest value."""
    console = output()
    with one_line_errors():
        spec = choose_cluster(workers, cpu=not gpus)
        if gpus and not spec.gpus:
            raise click.BadParameter("there are no two usable GPUs", param_hint="--gpus")
        error_table = table("fftn", "complex64", "complex128")
        with start(spec):
            for shape in _SHAPES:
                errors = [error(shape, dtype, spec.workers, spec.kind) for dtype in ("c8", "c16")]
                error_table.add_row(
                    " x ".join(map(str, shape)), *(f"{dtype_error:.1e}" for dtype_error in errors)
                )
        console.print(error_table)


if __name__ == "__main__":
    main()
