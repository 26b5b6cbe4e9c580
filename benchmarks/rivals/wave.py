"""A wave in three dimensions: 25 points, of order eight in space, in float32. No Dask in it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

__all__ = ["COEFFICIENTS", "FACTOR", "RADIUS", "reference", "wave"]

RADIUS = 4
COEFFICIENTS = (-205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560)  # of the second derivative
FACTOR = 0.1  # (speed * time step / distance) ** 2

# A thread goes along the first axis with nine values in registers. The others are periodic. All
# strides are of elements; those of the last axis are one.
_SOURCE = r"""
extern "C" __global__ void wave(
    const float* u, const float* before, float* out, int nx, int ny, int nz,
    long long ux, long long uy, long long bx, long long by, long long ox, long long oy
) {
    const float c[5] = {FACTORS};
    const int k = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y * blockDim.y + threadIdx.y;
    if (k >= nz || j >= ny) return;
    long long y0[5], y1[5];
    int z0[5], z1[5];
    for (int m = 1; m < 5; m++) {
        y0[m] = ((j - m + ny) % ny) * uy;
        y1[m] = ((j + m) % ny) * uy;
        z0[m] = (k - m + nz) % nz;
        z1[m] = (k + m) % nz;
    }
    const float* at = u + j * uy + k;
    float q[9];
    for (int m = 0; m < 8; m++) q[m + 1] = at[m * ux];
    const float* plane = u + 4 * ux;
    for (int i = 0; i < nx; i++, at += ux, plane += ux) {
        for (int m = 0; m < 8; m++) q[m] = q[m + 1];
        q[8] = at[8 * ux];
        float total = 3 * c[0] * q[4];
        for (int m = 1; m < 5; m++)
            total += c[m] * (q[4 - m] + q[4 + m] + plane[y0[m] + k] + plane[y1[m] + k]
                             + plane[j * uy + z0[m]] + plane[j * uy + z1[m]]);
        out[i * ox + j * oy + k] = 2 * q[4] - before[i * bx + j * by + k] + FACTOR * total;
    }
}
"""
_THREADS = (32, 8)


@cache
def _kernel() -> Any:
    import cupy

    factors = ", ".join(f"{each!r}f" for each in COEFFICIENTS)
    return cupy.RawKernel(
        _SOURCE.replace("FACTORS", factors).replace("FACTOR", f"{FACTOR!r}f"), "wave"
    )


def wave(u: Any, before: Any, out: Any) -> None:
    """Fill `out` from `u`, with a rim of `RADIUS` along axis 0, and the field before it, without.

    CuPy arrays may be views whose last axis is contiguous; NumPy's are of any kind.
    """
    if isinstance(out, np.ndarray):
        _on_host(u, before, out)
        return
    nx, ny, nz = out.shape
    strides = [s // 4 for each in (u, before, out) for s in each.strides[:2]]
    grid = (-(-nz // _THREADS[0]), -(-ny // _THREADS[1]))
    sizes = map(np.int32, (nx, ny, nz))
    _kernel()(grid, _THREADS, (u, before, out, *sizes, *map(np.int64, strides)))


def _on_host(u: Any, before: Any, out: Any) -> None:
    own = u[RADIUS:-RADIUS]

    def at(axis: int, by: int) -> Any:
        return np.roll(own, -by, axis) if axis else u[RADIUS + by : len(u) - RADIUS + by]

    out[...] = 3 * COEFFICIENTS[0] * own
    for by, factor in enumerate(COEFFICIENTS[1:], 1):
        for axis in range(3):
            out += factor * (at(axis, -by) + at(axis, by))
    out *= FACTOR
    out += 2 * own - before


def reference(u: Any, before: Any, steps: int) -> Any:
    """Return the newest field after some steps, of a whole array that is periodic, by NumPy."""
    for _ in range(steps):
        new = 3 * COEFFICIENTS[0] * u
        for by, factor in enumerate(COEFFICIENTS[1:], 1):
            for axis in range(3):
                new = new + factor * (np.roll(u, by, axis) + np.roll(u, -by, axis))
        u, before = 2 * u - before + FACTOR * new, u
    return u
