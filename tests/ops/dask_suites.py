"""Plugin for pytest: Dask's and NumPy's own tests with this package's functions in their place.

`test_dask_suites` has pytest load it, in a process of its own. Tests of what only Dask's own way
has are expected to fail. One that passes is an error: it would show that nothing was replaced.
"""

import sys
from functools import wraps

import dask_p2p
from dask_p2p import fft
from dask_p2p.ops.arguments import is_dask_array
from tests.suites import expect_failures

WIDE = "wants larger blocks where rims are wider than blocks, which is right here as it is"

NO_OUT = "gives `out`, which arrays of Dask have no use for"
WARNS = "waits for NumPy's warnings of what it will no longer take"

#: Why tests of Dask and NumPy fail, by module and name; of one that has parameters they may be
#: left out.
DASK = {
    "test_fft": {
        "test_cant_fft_chunked_axis": "expects an error where axes are cut",
        **{f"test_fft2n_shapes[{name}fftn]": WARNS for name in ("", "i", "r", "ir")},
        **{
            f"test_nd_ffts_axes[float32-{name}fft{n}]": "wants the last bits of NumPy's zeros"
            for name in ("", "i", "r", "ir")
            for n in "2n"
        },
    },
    "test_pocketfft": {
        "test_fft_out_argument": NO_OUT,
        "test_fft_inplace_out": NO_OUT,
        "test_fft_bad_out": NO_OUT,
        "test_fftn_out_argument": NO_OUT,
        "test_fftn_out_and_s_interaction": NO_OUT,
        "test_irfftn_out_and_s_interaction": NO_OUT,
        **dict.fromkeys(
            (f"test_ifft[{norm}]" for norm in (None, "backward", "ortho", "forward")),
            "wants NumPy's words for an array without elements",
        ),
        "test_rfftn": "transforms along an axis twice, which is refused here",
        "test_s_axes_none": WARNS,
        "test_s_axes_none_2D": WARNS,
        "test_s_contains_none": WARNS,
    },
    "test_helper": {},
    "test_rechunk": {"test_rechunk_intermediates": "counts the tasks that split and merge blocks"},
    "test_overlap": {
        "test_overlap_allow_rechunk_kwarg": WIDE,
        "test_map_overlap_rechunks_array_if_needed": WIDE,
        "test_map_overlap_rechunks_array_along_multiple_dims_if_needed": WIDE,
        "test_asymmetric_overlap_boundary_exception": "refuses what works here",
        "test_map_overlap_deprecated_signature": "gives the array first, which is refused here",
        "test_overlap_few_dimensions_small": "looks for the keys of Dask's pieces of rims",
        "test_overlap_few_dimensions": "counts more tasks than there are here",
    },
}


def pytest_configure(config):
    """Replace the functions before the tests import them."""
    if any("numpy" in arg for arg in config.args):
        replace_transforms(sys.modules["numpy.fft"])
    else:
        replace_function()


def replace_function():
    """Put `dask_p2p.rechunk` in the place of `dask.array.rechunk`, whatever method is chosen."""
    import dask.array as da

    # `da.rechunk` is the function, not the module.
    sys.modules["dask.array.rechunk"].rechunk = da.rechunk = dask_p2p.rechunk
    sys.modules["dask.array.overlap"].map_overlap = da.map_overlap = dask_p2p.map_overlap
    replace_transforms(da.fft)


def replace_transforms(module):
    """Put `dask_p2p.fft` in the place of a module's functions, for arrays that are cut."""
    for name in fft.__all__:
        if hasattr(module, name):
            setattr(module, name, of_cut_arrays(getattr(fft, name), getattr(module, name)))


def of_cut_arrays(function, original):
    """Cut the array that a function is given, along all axes, and return what NumPy would."""
    import dask.array as da
    import numpy as np

    @wraps(original)
    def replacement(x, *args, **kwargs):
        if isinstance(x, (int, float)):  # the length of a transform whose frequencies are wanted
            result = function(x, *args, **kwargs)
        else:
            array = x if is_dask_array(x) else da.from_array(np.asarray(x))
            if "shift" not in function.__name__:  # of which Dask's tests look at the chunks
                array = array.rechunk(tuple(max(1, n // 2 + 1) for n in array.shape))
            result = function(array, *args, **kwargs)
        return result if original.__module__.startswith("dask") else result.compute()

    return replacement


def pytest_collection_modifyitems(items):
    expect_failures(items, DASK)
