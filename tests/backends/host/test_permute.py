import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.backends.host import block_shape, permute_into
from dask_p2p.errors import BlockMismatchError, InputError
from tests.backends.support import DTYPES, boxes, permutations, random_bits
from tests.support import tune


@pytest.fixture(params=["in one piece", "in blocks"], autouse=True)
def block_sizes(request):
    """Everything also with blocks so small that all code runs on small arrays."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in blocks":
            tune(
                patch,
                blocked_items=0,
                block_items=4,
                grown_block_items=8,
                block_columns=3,
                most_block_rows=2,
                least_block_rows=2,
                unblocked_rows=1,
                cache_ways=1,
            )
        block_shape.cache_clear()
        yield request.param
    block_shape.cache_clear()


@given(st.data(), permutations(), st.sampled_from([*DTYPES, np.dtype("O")]))
def test_equals_transpose_bit_for_bit(data, case, dtype):
    shape, axes = case
    outer, box = data.draw(boxes(shape))
    block = random_bits(outer, dtype)
    block.flags.writeable = data.draw(st.booleans())
    src = block[(*box, ...)]  # with an ellipsis, no axes give an array too
    dst_outer, dst_box = data.draw(boxes([shape[a] for a in axes]))
    target = random_bits(dst_outer, dtype, seed=1)
    raw = dtype if dtype.kind == "O" else f"V{dtype.itemsize}"  # padding of structures included
    expected = target.view(raw).copy()
    expected[(*dst_box, ...)] = src.view(raw).transpose(axes)

    permute_into(target[(*dst_box, ...)], src, axes)

    if dtype.kind == "O":
        assert all(a is b for a, b in zip(target.flat, expected.flat, strict=True))
    else:
        assert target.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("shape", "dtype", "match"),
    [
        ((2, 3), "f8", r"shape \(3, 2\).*got \(2, 3\)"),
        ((1, 2), "f8", r"shape \(3, 2\)"),  # NumPy would not broadcast this, but would the next
        ((4, 3, 2), "f8", r"shape \(3, 2\)"),
        ((3, 2), "f4", "dtype float64, got float32"),
        ((3, 2), ">f8", "dtype float64, got >f8"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(shape, dtype, match):
    with pytest.raises(BlockMismatchError, match=match):
        permute_into(np.zeros(shape, dtype), np.zeros((2, 3)), (1, 0))


@pytest.mark.parametrize("axes", [(0,), (0, 0), (0, 2), (0, 1, 2)])
def test_axes_that_are_no_permutation_are_refused(axes):
    with pytest.raises(InputError, match="permutation of the 2 axes"):
        permute_into(np.zeros((3, 2)), np.zeros((2, 3)), axes)
