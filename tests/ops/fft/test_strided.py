from __future__ import annotations

import numpy as np
import pytest

from dask_p2p.ops.fft import local as local_fft
from dask_p2p.ops.fft.local import LocalTransform, columns_of
from tests.support import noted

fft = pytest.importorskip("scipy.fft")

SHAPES = [
    ((1024, 64), 0, "D", 64),
    ((512, 136), 0, "D", 0),
    ((512, 128), 0, "D", 64),
    ((256, 256), 0, "D", 64),
    ((2, 257, 256), 1, "D", 64),
    ((256, 4, 64), 0, "D", 64),
    ((1021, 8, 10 * 16), 0, "D", 64),
    ((8192, 256), 0, "D", 32),
    ((1024, 512), 0, "F", 64),
    ((512, 1500 * 4), 0, "F", 0),
    ((2**15, 256), 0, "D", 0),  # its columns would take much memory
    ((256, 1024), 1, "D", 0),
    ((256, 256), 0, "d", 0),
]


@pytest.mark.parametrize(("shape", "axis", "char", "columns"), SHAPES)
def test_columns_at_a_time(shape, axis, char, columns):
    assert columns_of(np.empty(shape, char), (axis,)) == columns


def test_views_and_several_axes_are_transformed_at_once():
    block = np.empty((256, 512), "D")
    assert columns_of(block[:, ::2], (0,)) == 0
    assert columns_of(block, (0, 1)) == 0


@pytest.mark.parametrize("norm", ["backward", "ortho"])
@pytest.mark.parametrize("name", ["fftn", "ifftn"])
@pytest.mark.parametrize(("shape", "axis", "char", "columns"), [s for s in SHAPES if s[3]])
def test_values_in_columns(shape, axis, char, columns, name, norm, monkeypatch):
    rng = np.random.default_rng(0)
    block = (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(char)
    expected = getattr(fft, name)(block, axes=(axis,), norm=norm)
    used = noted(monkeypatch, local_fft, "transform_columns", lambda *args: args[3])
    order = tuple(range(block.ndim))
    transform = LocalTransform(((name, (axis,), (shape[axis],)),), norm, order)
    result = transform(block)
    assert used == [columns]
    assert np.shares_memory(result, block)
    assert result.tobytes() == expected.tobytes()


def test_blocks_of_others_and_padded_ones_are_transformed_at_once(monkeypatch):
    monkeypatch.setattr(local_fft, "transform_columns", None)
    block = np.random.default_rng(0).random((256, 256)) + 0j
    steps = (("fftn", (0,), (256,)),)
    np.testing.assert_array_equal(LocalTransform(steps, "backward")(block), fft.fft(block, axis=0))
    padded = (("fftn", (0,), (300,)),)
    expected = fft.fft(block, 300, axis=0)
    np.testing.assert_array_equal(LocalTransform(padded, "backward", (0, 1))(block), expected)
