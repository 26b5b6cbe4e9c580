"""Programs of all operations, for lazy arrays of any library and blocks of any kind."""

import numpy as np

import dask_p2p
from dask_p2p import fft

SHAPE = (24, 20)
VALUES = np.random.default_rng(0).random(SHAPE)


def of_neighbours(block):
    out = block.copy()
    out[1:-1] += block[2:] - 2 * block[:-2]
    return out


def weighed(block, second, factor):
    block += factor * second[::-1]
    return block


def located(block, block_info=None):
    return block + block_info[0]["chunk-location"][0]


def smoothed(u, out):
    out[...] = (u[:-2] + u[2:]) / 2


def scaled(u, area, out):
    out[...] = (u[:-2] + u[2:]) / area


def react(u, v):
    return {"u": u[1:-1] + (v[:-2] - v[2:]) / 8, "v": v[1:-1] + (u[:-2] - u[2:]) / 8}


def normalised(ctx, x):
    return x / ctx.allreduce((x * x).sum())


#: Programs that any scheduler runs.
PROGRAMS = {
    "transpose": lambda x: dask_p2p.transpose(x),
    "transpose to chunks": lambda x: dask_p2p.transpose(x, chunks=(7, -1)),
    "transpose twice": lambda x: dask_p2p.transpose(dask_p2p.transpose(x) + 1),
    "slice of a transpose": lambda x: dask_p2p.transpose(x)[3:9],
    "product of transposes": lambda x: dask_p2p.transpose(x) * dask_p2p.transpose(x + 1),
    "rechunk": lambda x: dask_p2p.rechunk(x, (-1, 3)),
    "rechunk and transpose": lambda x: dask_p2p.rechunk(x, (5, (1, 23)), axes=(1, 0)),
    "map_overlap": lambda x: dask_p2p.map_overlap(of_neighbours, x, {0: 2}, "reflect"),
    "map_overlap of two": lambda x: dask_p2p.map_overlap(
        weighed, x, x + 1, depth={0: 1}, boundary=0.5, factor=3, dtype=float
    ),
    "map_overlap with its place": lambda x: dask_p2p.map_overlap(
        located, x, 1, "periodic", dtype=float
    ),
    "fft": lambda x: fft.fft(x, axis=0),
    "fft2": lambda x: fft.fft2(x, norm="ortho"),
    "fft there and back": lambda x: fft.ifft2(fft.fft2(x)),
    "fft with padding": lambda x: fft.fft(x, 30, axis=0),
    "rfft": lambda x: fft.rfftn(x, axes=(1, 0)),
    "irfft": lambda x: fft.irfft(fft.rfft(x, axis=0), 24, axis=0),
    "hfft": lambda x: fft.hfft(x + 0j, axis=0),
    "fftshift": lambda x: fft.fftshift(x, chunks=(-1, 5)),
    "fftfreq": lambda x: fft.fftfreq(24, 0.5, chunks=7, like=x),
    "rfftfreq": lambda x: fft.rfftfreq(24, 0.5, chunks=7, like=x),
}
#: Programs of Dask's functions, with this package in their place.
INSTALLED = {
    "rechunk": lambda x: x.rechunk((-1, 3)),
    "T and rechunk": lambda x: x.T.rechunk((2, -1)),
    "transpose and rechunk": lambda x: (x + 1).transpose(1, 0).rechunk((2, -1)),
    "map_overlap": lambda x: x.map_overlap(of_neighbours, {0: 2}, "reflect"),
}
#: Programs of sections, and of tasks on GPUs: these need workers with GPUs for CuPy blocks.
SECTIONS = {
    "iterate": lambda x: dask_p2p.iterate(smoothed, x, {0: 1}, 6),
    "iterate with a constant": lambda x: dask_p2p.iterate(
        scaled, x, {0: 1}, 6, boundary="reflect", constants=(x + 1,)
    ),
    "iterate coupled fields": lambda x: dask_p2p.iterate(
        react, {"u": x, "v": 2 * x}, {0: 1}, 6, ranks=2
    )["v"],
    "spmd": lambda x: dask_p2p.spmd(normalised, x),
    "map_on_gpu": lambda x: dask_p2p.map_on_gpu(of_neighbours, x, depth={0: 1}, fallback="numpy"),
    "fused": lambda x: dask_p2p.fused((x + 1) * x),
}
