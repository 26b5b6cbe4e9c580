"""Names of the axes of frames, and coordinates along them."""

from __future__ import annotations

import dask
import numpy as np
import pytest

from dask_p2p import Field, Save, iterate
from dask_p2p.errors import InputError
from tests.sections.iterate.output.test_stores import A, B, array

xr = pytest.importorskip("xarray")
pytest.importorskip("zarr")


def saved(save, given=None, steps=2):
    given = {"u": array(A, (12, 10)), "v": array(B, (12, 10))} if given is None else given
    made = iterate(lambda u, v: {"u": u + 1, "v": v}, given, 0, steps, save=save, ranks=1)
    return dask.compute(made, scheduler="sync")[0]


def opened(path):
    return xr.open_zarr(path, consolidated=False)


def test_xarray_opens_frames_without_names(tmp_path):
    saved(Save(tmp_path, 1))
    found = opened(tmp_path)
    assert dict(found.sizes) == {"frame": 2, "dim_0": 24, "dim_1": 20}
    np.testing.assert_array_equal(found.u[1], A + 1 + 1)


def test_names_and_coordinates(tmp_path):
    y = xr.DataArray(np.arange(24.0), dims="y", attrs={"units": "m"})
    saved(Save(tmp_path, 1, region=np.s_[::4], dims=["y", "x"], coords={"y": y}))
    found = opened(tmp_path)
    assert found.v.dims == ("frame", "y", "x")
    assert found.y.values.tolist() == [0, 4, 8, 12, 16, 20]
    assert found.y.attrs == {"units": "m"}


def test_fields_on_faces_have_axes_of_their_own(tmp_path):
    faces = array(np.zeros((25, 20)), ((12, 13), (10, 10)))
    saved(Save(tmp_path, 1, dims=["y", "x"]), {"u": array(A, (12, 10)), "v": Field(faces)})
    assert opened(tmp_path).v.dims == ("frame", "y_v", "x")


def test_other_fields_and_numbers_have_the_axis_of_frames(tmp_path):
    saved(Save(tmp_path, 1), {"u": array(A, (12, 10)), "v": 0.5})
    assert opened(tmp_path).v.dims == ("frame",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": ["y"]}, "expected 2 different names"),
        ({"dims": ["y", "y"]}, "expected 2 different names"),
        ({"dims": ["frame", "y"]}, "none of them 'frame'"),
        ({"dims": 3}, "expected 2 different names"),
        ({"coords": {"z": [1, 2]}}, "one-dimensional arrays of numbers"),
        ({"coords": {"dim_0": np.zeros(20)}}, "as long as the axes"),
        ({"coords": {"dim_0": ["a"] * 24}}, "one-dimensional arrays of numbers"),
        ({"dims": ["u", "x"], "coords": {"u": np.zeros(24)}}, "one-dimensional arrays"),
    ],
)
def test_wrong_names_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        saved(Save("frames", 1, **options))
