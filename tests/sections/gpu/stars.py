"""Steps of a star on an emulated GPU, and the same by NumPy."""

import gc

import dask.array as da
import numpy as np

from dask_p2p import iterate
from dask_p2p.sections.gpu.device import Gpu
from tests.sections.emulated import kernel, on_gpu, run_section
from tests.sections.iterate.test_programs import reference, star

X = np.random.default_rng(0).normal(size=(12, 10))
CHUNKS = ((3, 4, 5), (6, 4))


def compute(
    gpu, steps, function=None, ranks=4, boundary="periodic", gang=None, device=Gpu, **options
):
    """Compute steps on ranks, by default of the star, and check the order of all accesses.

    `gang` has keywords of `run_section`.
    """
    u, function = on_gpu(gpu, da.from_array(X, chunks=CHUNKS)), function or kernel(gpu, star)
    lazy_result = iterate(function, u, 1, steps, boundary=boundary, ranks=ranks, **options)
    (result,) = run_section(gpu, lazy_result, [X], device=device, **(gang or {}))
    gc.collect()
    gpu.check()
    return result


def check(gpu, steps, boundary="periodic", **options):
    """Compare the result of steps with that of NumPy."""
    (expected,) = reference(star, [X], 1, steps, boundary)
    assert np.array_equal(compute(gpu, steps, boundary=boundary, **options), expected)
