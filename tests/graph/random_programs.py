"""Random programs of this package's functions and those of a library of arrays.

Each operation takes values and an array of them, and returns the results of NumPy and of the
library; None if it does not suit the values.
"""

import pickle
import random

import cloudpickle
import dask
import numpy as np

import dask_p2p

MOST_ELEMENTS = 4000


def axes_of(rng, values):
    return tuple(rng.sample(range(values.ndim), values.ndim))


def chunks_of(rng, shape):
    return tuple(rng.choice([-1, max(1, n // 2), max(1, n // 3), min(3, n) or 1]) for n in shape)


def index_of(rng, shape):
    index = []
    for n in shape:
        first = rng.randrange(n)
        some = [slice(first, None, 2), slice(first, rng.randrange(first, n) + 1), slice(None)]
        some += [slice(None, None, -1)] + [first - n] * (len(shape) > 1)
        index.append(rng.choice(some))
    return tuple(index)


def neighbours(block):
    return np.roll(block, 1, 0) + np.roll(block, -1, 0)


def doubled(block):
    return block * 2


def of_rank(ctx, block):
    return block * 2


def transposed(da, rng, v, x):
    axes = axes_of(rng, v)
    chunks = rng.choice([None, chunks_of(rng, v.transpose(axes).shape)])
    return v.transpose(axes), dask_p2p.transpose(x, axes, chunks=chunks)


def rechunked(da, rng, v, x):
    axes = axes_of(rng, v)
    return v.transpose(axes), dask_p2p.rechunk(x, chunks_of(rng, [v.shape[a] for a in axes]),
                                               axes=axes)  # fmt: skip


def overlapped(da, rng, v, x):
    if len(v) < 3:
        return None
    y = rng.choice([dask_p2p.map_overlap, da.map_overlap])(
        neighbours, x, depth={0: 1}, boundary="periodic"
    )
    return neighbours(v), y


def sliced(da, rng, v, x):
    index = index_of(rng, v.shape)
    return v[index], x[index]


def gathered(da, rng, v, x):
    index = [rng.randrange(len(v)) for _ in range(4)]
    return v[index], x[index]


def reduced(da, rng, v, x):
    if v.ndim < 2:
        return None
    name = rng.choice(["sum", "max", "min", "mean"])
    axis, keepdims = rng.randrange(v.ndim), rng.random() < 0.5
    return (getattr(array, name)(axis=axis, keepdims=keepdims) for array in (v, x))


def centred(da, rng, v, x):
    axis = rng.randrange(v.ndim)
    return (array - array.mean(axis, keepdims=True) for array in (v, x))


def with_own_transpose(da, rng, v, x):
    transposes = dask_p2p.transpose(x), x.T
    return v.T + v.T, rng.choice(transposes) + rng.choice(transposes)


def multiplied(da, rng, v, x):
    if v.ndim != 2:
        return None
    return v @ v.T / 100, x @ rng.choice([dask_p2p.transpose(x), x.T]) / 100


def set_row(da, rng, v, x):
    v, x = v.copy(), x.copy()
    v[-1] = x[-1] = 7
    return v, x


def optimized(x):
    return x.optimize() if hasattr(x, "optimize") else dask.optimize(x)[0]


OPERATIONS = (
    transposed, transposed, rechunked, rechunked, overlapped, sliced, sliced, gathered, reduced,
    centred, with_own_transpose, multiplied, set_row,
    lambda da, rng, v, x: (v, pickle.loads(cloudpickle.dumps(x))),
    lambda da, rng, v, x: (np.fft.fft2(v, axes=(0, -1)).real,
                           dask_p2p.fft.fft2(x, axes=(0, -1)).real) if v.ndim > 1 else None,
    lambda da, rng, v, x: (np.fft.ifft(v).real, dask_p2p.fft.ifft(x).real),
    lambda da, rng, v, x: (v * 2, dask_p2p.spmd(of_rank, x, ranks=1)),
    lambda da, rng, v, x: (v * 2, dask_p2p.map_on_gpu(doubled, x, fallback="numpy")),
    lambda da, rng, v, x: (v.T, x.T),
    lambda da, rng, v, x: (v, x.rechunk(chunks_of(rng, v.shape))),
    lambda da, rng, v, x: (v.T, x.T.rechunk(chunks_of(rng, v.T.shape))),
    lambda da, rng, v, x: (v + 1, x + 1),
    lambda da, rng, v, x: (v * np.arange(v.shape[-1]), x * da.arange(v.shape[-1], chunks=3)),
    lambda da, rng, v, x: (np.where(v > 1, v, 0), da.where(x > 1, x, 0)),
    lambda da, rng, v, x: (np.concatenate([v, v * 2]), da.concatenate([x, x * 2])),
    lambda da, rng, v, x: (np.stack([v, v + 1]), da.stack([x, x + 1])) if v.ndim < 3 else None,
    lambda da, rng, v, x: (v.ravel(), x.ravel()),
    lambda da, rng, v, x: (np.flip(v, 0), da.flip(x, 0)),
    lambda da, rng, v, x: (v.astype("f4"), x.astype("f4")),
    lambda da, rng, v, x: (np.sqrt(abs(v)), abs(x).map_blocks(np.sqrt)),
    lambda da, rng, v, x: (v, x.persist()),
    lambda da, rng, v, x: (v, optimized(x)),
)  # fmt: skip


def program(da, seed):
    """Return the values and the array of a random program, by the steps of it."""
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 4, 7, 9, 9]) for _ in range(rng.choice([1, 2, 2, 3])))
    v = np.random.default_rng(seed).random(shape) * 10
    x = da.from_array(v, chunks=chunks_of(rng, shape))
    steps = [(v, x)]
    for _ in range(rng.randrange(2, 8)):
        if not 0 < v.size < MOST_ELEMENTS or not v.ndim:
            break
        if (pair := rng.choice(OPERATIONS)(da, rng, v, x)) is not None:
            v, x = pair
            steps.append((v, x))
    return rng, steps


def check_program(da, seed):
    """Compute the last array, perhaps with another one of its program, and compare the values."""
    rng, steps = program(da, seed)
    chosen = [steps[-1], *rng.sample(steps, rng.choice([0, 0, 1]))]
    results = dask.compute(*(x for _, x in chosen), scheduler="sync")
    for (v, x), values in zip(chosen, results, strict=True):
        tolerance = 1e-3 if values.dtype == "f4" else 1e-6  # of roots of small differences
        scale = max(1, np.abs(v).max(initial=0))
        np.testing.assert_allclose(values / scale, v / scale, atol=tolerance, err_msg=str(seed))
        assert (x.shape, x.dtype) == (v.shape, values.dtype), seed
