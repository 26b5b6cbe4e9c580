import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_p2p.backends.kernels.launch import CopyAxis, reduce_copy
from tests.backends.support import boxes, permutations


def moved(axes, word_bytes, src_offset, dst_offset):
    """Return every (source byte, destination byte) that a copy moves."""
    extents = [axis.extent for axis in axes]
    pairs = set()
    for position in np.ndindex(*extents):
        src = src_offset + sum(n * a.src_stride_bytes for n, a in zip(position, axes, strict=True))
        dst = dst_offset + sum(n * a.dst_stride_bytes for n, a in zip(position, axes, strict=True))
        pairs |= {(src + byte, dst + byte) for byte in range(word_bytes)}
    return pairs


@given(
    st.data(),
    permutations(min_side=1, max_side=4, max_ndim=4),
    st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24]),
    st.integers(0, 32),
)
def test_the_least_form_moves_the_same_bytes(data, case, itemsize, alignment):
    shape, axes = case
    dtype = np.dtype(("V", itemsize))
    outer, box = data.draw(boxes(shape))
    src = np.empty(outer, dtype)[box].transpose(axes)
    dst_outer, dst_box = data.draw(boxes(src.shape))
    dst = np.empty(dst_outer, dtype)[dst_box]

    least = reduce_copy(src.shape, itemsize, src.strides, dst.strides, alignment)

    full_axes = [CopyAxis(*axis) for axis in zip(src.shape, src.strides, dst.strides, strict=True)]
    assert moved(
        least.axes, least.word_bytes, least.src_offset_bytes, least.dst_offset_bytes
    ) == moved(full_axes, itemsize, 0, 0)
    assert len(least.axes) <= len(shape) + 1
    strides = [axis.dst_stride_bytes for axis in least.axes]
    assert strides == sorted(strides, reverse=True)
    assert all(stride > 0 for stride in strides)
    assert all(axis.extent > 1 for axis in least.axes)
    assert least.word_bytes in (1, 2, 4, 8, 16)
    multiples = [alignment, least.src_offset_bytes, least.dst_offset_bytes]
    for axis in least.axes:
        multiples += axis[1:]
    assert all(number % least.word_bytes == 0 for number in multiples)


@pytest.mark.parametrize(
    ("shape", "itemsize", "src", "dst", "alignment", "expected", "word"),
    [
        ((), 4, (), (), 0, [], 4),
        ((1, 1), 8, (7, 9), (1, 1), 0, [], 8),
        ((6, 7), 8, (56, 8), (56, 8), 0, [(21, 16, 16)], 16),  # one run
        ((6, 7), 8, (56, 8), (56, 8), 8, [(42, 8, 8)], 8),  # the same at an odd address
        ((7, 6), 8, (8, 56), (48, 8), 0, [(7, 8, 48), (6, 56, 8)], 8),  # transposed
        ((7, 1, 6), 8, (8, 5, 56), (48, 5, 8), 0, [(7, 8, 48), (6, 56, 8)], 8),
        # batch of transposes; rows kept together; items of three bytes
        ((5, 7, 6), 4, (168, 4, 28), (168, 24, 4), 0, [(5, 168, 168), (7, 4, 24), (6, 28, 4)], 4),
        ((7, 6, 2), 4, (8, 56, 4), (48, 8, 4), 0, [(7, 8, 48), (6, 56, 8)], 8),
        ((7, 6), 3, (3, 21), (18, 3), 0, [(7, 3, 18), (6, 21, 3), (3, 1, 1)], 1),
        ((7, 6), 12, (12, 84), (72, 12), 0, [(7, 12, 72), (6, 84, 12), (3, 4, 4)], 4),
        # items of 8 bytes at an address that is a multiple of 4 only
        ((7, 6), 8, (8, 56), (48, 8), 4, [(7, 8, 48), (6, 56, 8), (2, 4, 4)], 4),
    ],
)
def test_least_forms(shape, itemsize, src, dst, alignment, expected, word):
    least = reduce_copy(shape, itemsize, src, dst, alignment)
    assert least.axes == tuple(CopyAxis(*axis) for axis in expected)
    assert least.word_bytes == word
