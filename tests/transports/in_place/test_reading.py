"""What descriptors must say; the rest is tested with each transport."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dask_p2p.backends import dtype_text
from dask_p2p.errors import BlockMismatchError, TransferError
from dask_p2p.transports.base import Request
from dask_p2p.transports.same_host import Descriptor


def test_a_descriptor_that_is_not_that_of_the_block():
    block = Request(("x", 0), "holder", (2, 3), np.dtype("f8"), "cupy", [])
    published = Descriptor("('x', 0)", (2, 3), (24, 8), dtype_text(np.dtype("f8")), {"address": 1})
    assert Descriptor.parse(published.text(), block) == published
    with pytest.raises(TransferError, match=r"descriptor of .* is that of \('x', 1\)"):
        Descriptor.parse(replace(published, key="('x', 1)").text(), block)
    with pytest.raises(BlockMismatchError):
        Descriptor.parse(replace(published, shape=(3, 2)).text(), block)
    for torn in (b"", b"\xff", published.text()[:-1], b"{}", b"[]"):
        with pytest.raises(TransferError, match=r"the descriptor of .* cannot be read"):
            Descriptor.parse(torn, block)
