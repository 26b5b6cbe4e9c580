from __future__ import annotations

import pickle

import numpy as np
import pytest

from dask_p2p.fusing.running.messages import from_quick_form, quick_form

SMALL = {
    "float": -0.0,
    "int": 2**70,
    "bool": True,
    "complex": complex("nan+1j"),
    "scalar": np.float32(1.5),
    "nan with a payload": np.array([0x7FF8000000000123], "u8").view(float)[0],
    "part of a sum": np.full((1, 1), 2.5),
    "0-d": np.array(3, "i2"),
    "empty": np.zeros((0, 3), "F"),
}
OTHERS = {
    "text": "a",
    "large": np.zeros(1000),
    "columns": np.asfortranarray(np.ones((2, 3))),
    "big-endian": np.ones(1, ">f8"),
    "with metadata": np.ones(1, np.dtype(float, metadata={"unit": "m"})),
    "date": np.datetime64("2020-01-01"),
    "structure": np.zeros(1, "f8,i4"),
    "masked": np.ma.masked_array([1.0], [True]),
    "object": np.array([None]),
    "list": [1],
}


@pytest.mark.parametrize("name", SMALL)
def test_small_values(name):
    value = SMALL[name]
    got = from_quick_form(pickle.loads(pickle.dumps(quick_form(value))))
    assert type(got) is type(value)
    if isinstance(value, (np.ndarray, np.generic)):
        assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes())
        assert got.flags.writeable == isinstance(value, np.ndarray)
        assert got.dtype is value.dtype
    else:
        assert repr(got) == repr(value)


@pytest.mark.parametrize("name", OTHERS)
def test_other_values(name):
    assert quick_form(OTHERS[name]) is None
