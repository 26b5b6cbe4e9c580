"""Fingerprints of arrays that are divided between ranks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.geometry import box_slices, cut_box, split_box, whole_box
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.iterate.output import checkpoints as fingerprints
from dask_p2p.sections.iterate.output.checkpoints import fingerprint

DEVICE = Host()


def whole(array):
    return fingerprint(DEVICE, array, whole_box(array.shape))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(fingerprints, "_COPIED_ELEMENTS", 60)
    monkeypatch.setattr(fingerprints, "_PIECE_ELEMENTS", 7)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.sampled_from(["f8", "f4", "f2", "i1", "c16", "?", "M8[ns]", "i1,i2"]),
    st.integers(1, 40),
)
def test_parts_of_an_array_have_the_sum_of_the_whole(shape, dtype, most):
    rng = np.random.default_rng(sum(shape))
    array = rng.integers(0, 2, size=(*shape, np.dtype(dtype).itemsize)).astype("i1")
    array = array.view(dtype)[..., 0]
    box = whole_box(shape)
    parts = [fingerprint(DEVICE, array[box_slices(of)], of) for of in split_box(box, most)]
    assert np.array(parts, "u8").sum() == whole(array)


def of_natural_changes(x):
    yield "sign", -x
    yield "one more", x + 1
    yield "twice", x * 2
    yield "shifted", np.roll(x, 1, axis=0)
    yield "transposed", x.T.copy()
    yield "flipped", x[::-1]
    yield "exchanged", x[[1, 0, *range(2, len(x))]]
    last = x.copy()
    last[-1, -1] = np.nextafter(last[-1, -1], 9)
    yield "one bit", last
    two = x.copy()
    two[:2, :2] *= -1  # four signs
    yield "signs", two
    yield "zeros", np.zeros_like(x)


@pytest.mark.parametrize("x", [np.arange(64.0).reshape(8, 8) - 7.5, np.ones((8, 8)) + np.eye(8)])
def test_other_values_have_other_fingerprints(x):
    found = {name: int(whole(other)) for name, other in of_natural_changes(x)}
    found["itself"] = int(whole(x))
    if (x == x.T).all():
        del found["transposed"]
    assert len({*found.values()}) == len(found)


def test_numbers_and_views():
    with warnings.catch_warnings(action="error"):
        one, other = (fingerprint(DEVICE, np.array(value), ()) for value in (1.0, 2.0))
    assert one != other
    x = np.arange(60.0).reshape(6, 10)
    assert whole(x[::2, ::-1]) == whole(x[::2, ::-1].copy())
    assert whole(np.asfortranarray(x)) == whole(x)
    left, right = cut_box(whole_box(x.shape), 1, 3)
    parts = [fingerprint(DEVICE, x[box_slices(of)], of) for of in (left, right)]
    assert np.array(parts).sum() == whole(x)
