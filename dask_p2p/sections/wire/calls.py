"""Calls of all ranks: their headers, and the errors of ranks that make different calls."""

from __future__ import annotations

from typing import Any

from dask_p2p.errors import SectionError
from dask_p2p.sections.wire.messages.format import HEADER


def text_of(header: Any) -> str:
    """Return the text of the call in a header."""
    return _decoded(HEADER.unpack(header)[2])


def checked_call(
    header: Any,  # received from `rank`
    wanted: tuple[int, int | None, bytes],  # number, payload size, text; None: any size
    own: int,  # this rank
    rank: int,
) -> int:
    """Return the size of a call's payload. Raises `SectionError` for another call than wanted."""
    number: int
    size_bytes: int
    number, size_bytes, text = HEADER.unpack(header)
    own_number, wanted_bytes, own_text = wanted
    is_size = wanted_bytes is None or size_bytes == wanted_bytes
    if number == own_number and is_size and text.rstrip(b"\0") == own_text:
        return size_bytes
    calls = sorted([(own, own_number, _decoded(own_text)), (rank, number, _decoded(text))])
    first, second = (f"{call} on rank {each}" for each, _, call in calls)
    if number != own_number:
        second = f"call {calls[1][1]} was {second}"
    raise SectionError(
        f"expected the same calls on all ranks, in the same order, but call {calls[0][1]} was "
        f"{first}, and {second}. {_remedy(*(call for *_, call in calls))}"
    )


def _remedy(first: str, second: str) -> str:
    name = first.partition("(")[0]
    if name != second.partition("(")[0] or " of " not in first:
        return (
            "Make no call of the context depend on the rank, or on values that differ between "
            "ranks."
        )
    if name in ("gather", "allgather"):
        return f"Give values of one shape and dtype, or call ctx.{name}(value, ragged=True)."
    return "Give the same arguments, and values of one shape and dtype, on all ranks."


def no_message(own: int, call: str, rank: int, its_call: str) -> SectionError:
    """Return the error of a rank that waits for a message of one that makes a call of all ranks."""
    return SectionError(
        f"expected a message of rank {rank} for {call} of rank {own}, but rank {rank} called "
        f"{its_call}. Let it send first, ctx.send(value, dest={own}), and make the other calls in "
        f"the same order on all ranks."
    )


def _decoded(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")
