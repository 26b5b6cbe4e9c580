import numpy as np
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
