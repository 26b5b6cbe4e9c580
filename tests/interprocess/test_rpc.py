"""A holder's errors reach the reader as plain text."""

from __future__ import annotations

import pytest

from dask_p2p.errors import BlockMismatchError, Obstacle, TransferError, UnsupportedArrayError
from dask_p2p.transports.rpc import check_reply, refuse

BLOCK = "block 'x' of there"


GONE = "block 'x' of there is no longer there"
FAILED = "there could not send .*"


@pytest.mark.parametrize(
    ("raised", "error", "words", "details"),
    [
        (KeyError("x"), TransferError, GONE, ("block", False)),
        (MemoryError("1 GiB"), TransferError, FAILED + "out of memory .*1 GiB", ("route", False)),
        (RuntimeError("trouble"), TransferError, FAILED + "RuntimeError: tr", ("route", False)),
        (TransferError("late", is_silence=True), TransferError, FAILED, ("route", True)),
        (TransferError("short", scope="region"), TransferError, "another", ("region", False)),
        (BlockMismatchError("of (2,)"), BlockMismatchError, r"of \(2,\) \(held by there\)", None),
        (UnsupportedArrayError("masked"), BlockMismatchError, "masked .*held by there", None),
    ],
    ids=str,
)
def test_what_a_holder_raises_reaches_the_reader_as_text(raised, error, words, details):
    """With the other reads that fail too."""
    reply = refuse(raised)
    assert all(type(value) is str for value in reply.values())
    with pytest.raises(error, match=words) as caught:
        check_reply(reply, "there", BLOCK)
    assert type(caught.value) is error
    if details is not None:
        assert (caught.value.scope, caught.value.is_silence) == details


def test_an_obstacle_goes_from_holder_to_reader():
    obstacle = Obstacle("not-shareable", "it cannot be shared", "Share it")
    reply = refuse(TransferError(obstacle.full_text, obstacle=obstacle))
    with pytest.raises(TransferError, match=r"it cannot be shared\. Share it") as caught:
        check_reply(reply, "there", BLOCK)
    assert caught.value.obstacle == obstacle
