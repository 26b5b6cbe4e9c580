"""A Fourier transform of a cube in slabs, beside what is written with Dask, and mpi4py-fft's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
from dask.array import fft as dask_fft

from benchmarks.measure import Case, Way, no_op
from benchmarks.report import NO_OP
from benchmarks.rivals import mpi_fftn
from benchmarks.tables import OURS
from dask_p2p import fft
from dask_p2p.geometry import split_evenly

DASK = "dask "  # the first word of Dask's own ways
_TOLERANCE = 5000  # units of the last place of the largest value


@dataclass(frozen=True, slots=True)
class Spectrum(Case):
    """A cube in slabs, to be transformed along all axes, and left in slabs of another axis."""

    reach: float = 2.0  # how many times as fast as the faster of Dask's ways

    def ways(self, on_gpus: bool) -> dict[str, Way]:
        """Return the ways to measure, by name; on GPUs Dask's p2p and MPI are left out."""
        ways = {
            OURS: Way(lambda x, _: fft.fftn(x), required=True),
            NO_OP: Way(no_op, checked=False),
            f"{DASK}tasks": Way(lambda x, _: self.by_rechunk(x, "tasks")),
        }
        if not on_gpus:
            ways[f"{DASK}p2p"] = Way(lambda x, _: self.by_rechunk(x, "p2p"))
            ways[mpi_fftn.WAY] = Way(lambda *_: mpi_fftn.seconds(self, len(self.chunks[0])))
        return ways

    def by_rechunk(self, x: Any, method: str) -> Any:
        """Return what a user of Dask writes: axes that are whole, a rechunk, the other one."""
        half = dask_fft.fftn(x, axes=(1, 2))
        parts = split_evenly(self.shape[1], len(self.chunks[0]))
        return dask_fft.fft(half.rechunk({0: -1, 1: parts}, method=method), axis=0)

    def wrong(self, y: Any) -> int:
        """Count the elements that differ from Dask's."""
        expected = self.by_rechunk(self.make(), "tasks")
        most = _TOLERANCE * float(np.finfo(expected.dtype).eps) * da.abs(expected).max()
        return int((da.abs(y - expected) > most).sum().compute())
