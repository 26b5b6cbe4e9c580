"""Parts of several blocks, packed late and sent in turn."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from dask_p2p.backends.host_queue import HostQueue
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.transports.buffers import Buffers
from dask_p2p.transports.replies import dtype_text
from dask_p2p.transports.ucx_sending import Sending

BOXES = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
ROWS = [(number, box) for number in range(3) for box in BOXES]


class LateQueue(HostQueue):
    """Packs when somebody waits for it, as a GPU might."""

    def __init__(self, happened):
        super().__init__(NUMPY)
        self._happened = happened

    def pack(self, dst, src):
        block = weakref.ref(src.base)
        box = tuple(src.shape)
        start = (src.ctypes.data - src.base.ctypes.data) // src.base.strides[0]
        del src
        self._happened.append("begun")

        def wait():
            assert block() is not None, "its memory may be another's by now"
            dst[...] = block()[start : start + box[0], : box[1]]
            self._happened.append("packed")

        return wait

    def synchronize(self):
        self._happened.append("synchronized")


class Host:
    """Has each block only until it is asked for."""

    def __init__(self, blocks):
        self.blocks = blocks

    def block(self, key):
        return self.blocks.pop(key)


@pytest.fixture
def happened(monkeypatch):
    happened = []
    monkeypatch.setattr(NUMPY, "queue", lambda beside_copies: LateQueue(happened))
    return happened


@pytest.fixture
def sent(happened):
    sent = []

    def send(array):
        happened.append("sent")
        sent.append(array.copy())

    outbox = SimpleNamespace(
        has_room=lambda nbytes: True, send=send, close=lambda: happened.append("closed")
    )
    return SimpleNamespace(arrays=sent, outbox=outbox)


def sending(blocks, outbox):
    buffers = {"numpy": Buffers("numpy", 2**20)}
    return Sending(Host(blocks), buffers, True, dtype_text(np.dtype("f8")), outbox, None)


def test_the_next_block_is_packed_while_the_one_before_is_sent(happened, sent):
    values = np.arange(36.0).reshape(3, 4, 3)
    packing = sending({number: values[number].copy() for number in range(3)}, sent.outbox)
    assert packing.run([(number, (4, 3)) for number in range(3)], ROWS) == {}
    np.testing.assert_array_equal(np.concatenate(sent.arrays), values.reshape(12, 3))
    assert packing.sums == [0] * 6
    each = ["packed", "sent"]
    assert happened == ["begun", *["begun", *each] * 5, *each, "synchronized", "closed"]


def test_what_comes_before_a_block_that_is_missing_is_sent(happened, sent):
    packing = sending({0: np.ones((4, 3))}, sent.outbox)
    assert packing.run([(number, (4, 3)) for number in range(3)], ROWS) == {"status": "missing"}
    assert len(sent.arrays) == len(packing.sums) == 2
    assert happened[-2:] == ["synchronized", "closed"]


def test_all_is_over_before_an_error_is_told(happened, sent):
    def fail(array):
        raise OSError("no messenger")

    sent.outbox.send = fail
    packing = sending({0: np.ones((4, 3))}, sent.outbox)
    with pytest.raises(OSError, match="no messenger"):
        packing.run([(0, (4, 3))], ROWS[:2])
    assert happened == ["begun", "begun", "packed", "synchronized", "closed"]
