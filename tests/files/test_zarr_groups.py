from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.files.zarr_io import create_zarr, open_zarr

xarray = pytest.importorskip("xarray")
zarr = pytest.importorskip("zarr", minversion="3")

SHAPE = (6, 8, 10)
AXES = (2, 0, 1)


@pytest.fixture
def dataset():
    """A data set with coordinates of all kinds, and a variable that does not belong to `t`."""
    coordinates = {
        "time": np.arange("2020-01-01", "2020-01-07", dtype="M8[D]").astype("M8[ns]"),
        "lat": np.linspace(0, 1, 8),
        "season": ("time", np.array(["w", "w", "s", "s", "a", "a"])),
        "height": (("lat", "lon"), np.arange(80.0).reshape(8, 10)),
        "run": 5,
        "depth": [1.0, 2.0],
    }
    variables = {
        "t": (("time", "lat", "lon"), np.arange(480.0).reshape(SHAPE), {"units": "K"}),
        "p": (("time", "depth"), np.zeros((6, 2))),
    }
    return xarray.Dataset(variables, coordinates, {"title": "test"})


def write_transposed(source, target):
    opened = open_zarr(str(source))
    shape, chunks = ([of[axis] for axis in AXES] for of in (opened.shape, opened.chunks))
    written = create_zarr(
        target, "out", (*shape,), opened.dtype, (*chunks,), like=opened, axes=AXES
    )
    block = opened[tuple(slice(0, n) for n in opened.shape)]
    written[tuple(slice(0, n) for n in shape)] = block.transpose(AXES)


@pytest.mark.filterwarnings("ignore:.*pecification:zarr.errors.UnstableSpecificationWarning")
@pytest.mark.filterwarnings("ignore:Consolidated metadata:zarr.errors.ZarrUserWarning")
@pytest.mark.parametrize("version", [2, 3])
def test_xarray_opens_what_it_wrote_with_other_axes(tmp_path, dataset, version):
    dataset.to_zarr(
        tmp_path / "in.zarr", zarr_format=version, encoding={"t": {"chunks": (2, 8, 5)}}
    )
    write_transposed(tmp_path / "in.zarr" / "t", tmp_path / "out.zarr")
    out = xarray.open_dataset(tmp_path / "out.zarr", engine="zarr")
    expected = dataset.t.transpose("lon", "time", "lat", transpose_coords=False)
    xarray.testing.assert_identical(out.t.load(), expected)
    assert set(out.data_vars) == {"t"}
    assert out.attrs == dataset.attrs
    assert out.t.encoding["chunks"] == (5, 2, 8)


def test_an_array_whose_axes_have_no_names_comes_alone(tmp_path):
    group = zarr.create_group(tmp_path / "in.zarr")
    group.create_array("a", data=np.zeros(SHAPE))
    write_transposed(tmp_path / "in.zarr" / "a", tmp_path / "out.zarr")
    assert zarr.open_array(tmp_path / "out.zarr", mode="r").shape == (10, 6, 8)
