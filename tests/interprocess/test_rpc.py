"""A holder's errors reach the reader as plain text."""

from __future__ import annotations

import pytest

from dask_p2p.errors import (
    BlockMismatchError,
    Obstacle,
    TransferError,
    UnsupportedArrayError,
)
from dask_p2p.transports.rpc import check_reply, refuse

BLOCK = "block 'x' of there"


@pytest.mark.parametrize(
    ("raised", "error", "words"),
    [
        (KeyError("x"), TransferError, "block 'x' of there is no longer there"),
        (BlockMismatchError("of (2,)"), BlockMismatchError, r"of \(2,\) \(held by there\)"),
        (UnsupportedArrayError("masked"), BlockMismatchError, "masked .*held by there"),
        (MemoryError("1 GiB"), TransferError, "there could not send .*out of memory .*1 GiB"),
        (RuntimeError("trouble"), TransferError, "there could not send .*RuntimeError: trouble"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_holder_raises_reaches_the_reader_as_text(raised, error, words):
    reply = refuse(raised)
    assert all(type(said) is str for said in reply.values())
    with pytest.raises(error, match=words) as caught:
        check_reply(reply, "there", BLOCK)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("raised", "scope", "is_silence"),
    [
        (KeyError("x"), "block", False),
        (RuntimeError("trouble"), "route", False),
        (TransferError("no message", is_silence=True), "route", True),
        (TransferError("runs are short", scope="region"), "region", False),
    ],
    ids=str,
)
def test_the_reads_that_fail_with_a_block(raised, scope, is_silence):
    with pytest.raises(TransferError) as caught:
        check_reply(refuse(raised), "there", BLOCK)
    assert (caught.value.scope, caught.value.is_silence) == (scope, is_silence)


def test_an_obstacle_goes_from_holder_to_reader():
    obstacle = Obstacle("not-shareable", "it cannot be shared", "Share it")
    reply = refuse(TransferError(obstacle.full_text, obstacle=obstacle))
    with pytest.raises(TransferError, match=r"it cannot be shared\. Share it") as caught:
        check_reply(reply, "there", BLOCK)
    assert caught.value.obstacle == obstacle
