"""A 3-D wave: a 25-point stencil of order eight in space, in float32, without Dask."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

__all__ = ["COEFFICIENTS", "FACTOR", "RADIUS", "launch", "reference", "source", "wave"]

RADIUS = 4
COEFFICIENTS = (-205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560)  # of the second derivative
FACTOR = 0.1  # (speed * time step / distance) ** 2

# A block of threads goes along the first axis. Each thread keeps nine values of its column in
# registers. The middle plane and its halo lie in shared memory for the neighbouring threads. The
# halo has fewer values than the block has threads, so each thread reads at most one, a plane ahead.
# The other axes are periodic, also for threads beyond them. Strides count elements; the last axis's
# are one.
_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(WIDE * HIGH) wave(
    const float* __restrict__ u, const float* __restrict__ before, float* __restrict__ out,
    int nx, int ny, int nz, int planes,
    long long ux, int uy, long long bx, int by, long long ox, int oy
) {
    const float c[5] = {FACTORS};
    __shared__ float tile[2][HIGH + 8][WIDE + 8];
    const int x = threadIdx.x, y = threadIdx.y, t = y * WIDE + x;
    const int k = blockIdx.x * WIDE + x, j = blockIdx.y * HIGH + y;
    const bool is_inside = k < nz && j < ny;

    int row, column;  // of the value in the rim that this thread reads
    if (t < 8 * (WIDE + 8)) {  // above and below
        row = t / (WIDE + 8);
        row += row < 4 ? 0 : HIGH;
        column = t % (WIDE + 8);
    } else {  // left and right
        const int e = t - 8 * (WIDE + 8);
        row = 4 + e / 8;
        column = e % 8;
        column += column < 4 ? 0 : WIDE;
    }
    const bool has_rim = t < 8 * (WIDE + 8) + 8 * HIGH;
    const int rim_j = ((int)(blockIdx.y * HIGH) + row - 4 + 8 * ny) % ny;
    const int rim_k = ((int)(blockIdx.x * WIDE) + column - 4 + 8 * nz) % nz;

    const int first = blockIdx.z * planes, last = min(nx, first + planes);
    const float* at = u + first * ux + (long long)(j % ny) * uy + k % nz;
    const float* rim = u + (first + 4) * ux + (long long)rim_j * uy + rim_k;
    before += first * bx + (long long)j * by + k;
    out += first * ox + (long long)j * oy + k;
    float q[9], next = has_rim ? *rim : 0;
    #pragma unroll
    for (int m = 0; m < 8; m++) q[m + 1] = at[m * ux];
    at += 8 * ux;
    for (int i = first, b = 0; i < last; i++, b ^= 1) {
        #pragma unroll
        for (int m = 0; m < 8; m++) q[m] = q[m + 1];
        q[8] = *at;
        tile[b][y + 4][x + 4] = q[4];
        if (has_rim) {
            tile[b][row][column] = next;
            rim += ux;
            if (i + 1 < last) next = *rim;
        }
        const float older = is_inside ? *before : 0;
        __syncthreads();  // one for each plane: who writes a tile again has passed the next one
        float total = 3 * c[0] * q[4];
        #pragma unroll
        for (int m = 1; m < 5; m++)
            total += c[m] * (q[4 - m] + q[4 + m] + tile[b][y + 4 - m][x + 4]
                             + tile[b][y + 4 + m][x + 4] + tile[b][y + 4][x + 4 - m]
                             + tile[b][y + 4][x + 4 + m]);
        if (is_inside) *out = 2 * q[4] - older + FACTOR * total;
        at += ux;
        before += bx;
        out += ox;
    }
}
"""
_WIDE, _HIGH = 32, 16  # threads of a block
_BLOCKS = 1024  # that are wanted: some for each multiprocessor
_STRIDES = np.int64, np.int32
_PLANES = 16  # at least, of a block: it reads eight more


def source() -> str:
    """Return the kernel's text."""
    factors = ", ".join(f"{coefficient!r}f" for coefficient in COEFFICIENTS)
    text = _SOURCE.replace("FACTORS", factors).replace("FACTOR", f"{FACTOR!r}f")
    return text.replace("WIDE", str(_WIDE)).replace("HIGH", str(_HIGH))


def launch(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the grid, a block of it, and the planes of a block, for an output of this shape."""
    nx, ny, nz = shape
    across = -(-nz // _WIDE), -(-ny // _HIGH)
    planes = max(_PLANES, -(-nx * across[0] * across[1] // _BLOCKS))
    return (*across, -(-nx // planes)), (_WIDE, _HIGH), planes


@cache
def _kernel() -> Any:
    import cupy

    return cupy.RawKernel(source(), "wave")


def wave(u: Any, before: Any, out: Any) -> None:
    """Fill `out` from `u`, with a halo of `RADIUS` along axis 0, and `before`, without a halo.

    CuPy arrays may be views with a contiguous last axis; NumPy arrays may be any views.
    """
    if isinstance(out, np.ndarray):
        _on_host(u, before, out)
        return
    grid, block, planes = launch(out.shape)
    strides = [
        stride_type(s // 4)
        for a in (u, before, out)
        for stride_type, s in zip(_STRIDES, a.strides[:2], strict=True)
    ]
    sizes = map(np.int32, (*out.shape, planes))
    _kernel()(grid, block, (u, before, out, *sizes, *strides))


def _on_host(u: Any, before: Any, out: Any) -> None:
    interior = u[RADIUS:-RADIUS]

    def at(axis: int, by: int) -> Any:
        return np.roll(interior, -by, axis) if axis else u[RADIUS + by : len(u) - RADIUS + by]

    out[...] = 3 * COEFFICIENTS[0] * interior
    for by, factor in enumerate(COEFFICIENTS[1:], 1):
        for axis in range(3):
            out += factor * (at(axis, -by) + at(axis, by))
    out *= FACTOR
    out += 2 * interior - before


def reference(u: Any, before: Any, steps: int) -> Any:
    """Return the newest field after some steps, of a whole array that is periodic, by NumPy."""
    for _ in range(steps):
        new = 3 * COEFFICIENTS[0] * u
        for by, factor in enumerate(COEFFICIENTS[1:], 1):
            for axis in range(3):
                new = new + factor * (np.roll(u, by, axis) + np.roll(u, -by, axis))
        u, before = 2 * u - before + FACTOR * new, u
    return u
