"""Messages between two ranks: sends, receives, and exchanges that consist of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from dask_p2p import tuning
from dask_p2p.errors import InputError, SectionError
from dask_p2p.inputs import as_integer
from dask_p2p.sections.exchange.device import HOST, Host
from dask_p2p.sections.exchange.values import (
    LastOut,
    copied,
    decoded,
    decoded_small,
    encoded,
    is_array,
    small_frame,
)
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.sections.wire.frames import (
    CALL_NAMES,
    MOST_TAG,
    offer_message,
    small_value,
    value_message,
)
from dask_p2p.sections.wire.mailbox import Arrival, Mailbox, Receive
from dask_p2p.types import Array


class Messages:
    """The messages of one rank of a communicator to and from the others."""

    def __init__(
        self,
        rank: int,  # this rank
        size: int,  # number of ranks
        connections: Connections,  # connections to the other ranks
        device: Host,  # of the arrays; values pass through host memory
        reads_memory: bool,  # whether ranks of one host may read each other's memory
        name: str,  # of the communicator, the same on its ranks; "" for all ranks of the section
    ) -> None:
        self.rank, self.size, self._connections, self.device = rank, size, connections, device
        self._reads_memory, self._communicator = reads_memory, crc32(name.encode())
        self._to_itself = Mailbox()  # messages with values, not bytes
        self._last_out = LastOut()

    def _send(self, value: Any, dest: int | None, tag: int) -> Transfer:
        if dest is None:
            return DONE
        if dest == self.rank:
            arrival = Arrival(tag, self._communicator, data=copied(value, self.device))
            self._to_itself.take(arrival)
            return DONE
        connections = self._connections
        frame = small_frame(value, tag, self._communicator)
        if frame is not None and connections.send_small(dest, frame):
            return DONE
        encoded_value = encoded(value, self.device)
        arrays = encoded_value.on_device
        if arrays and (offer := connections.offer(dest, arrays)) is not None:
            message = offer_message(tag, self._communicator, *encoded_value, arrays, offer)
            connections.send_message(dest, message)
            return Transfer(partial(connections.wait_for_sent, dest, message))
        description, parts = encoded_value.on_host(self.device) if arrays else encoded_value
        is_large = self._reads_memory and sum(map(len, parts)) >= tuning.current.read_bytes
        may_read = is_large and not connections.is_on_other_host(dest)
        message = value_message(tag, self._communicator, description, parts, may_read)
        connections.send_message(dest, message)
        return Transfer(partial(connections.wait_for_sent, dest, message))

    def _receive_next(self, source: int | None, tag: int, out: Any = None) -> Any:
        if source is None:
            return None
        frame = self._connections.receive_small(source)
        if frame is None:
            return self._receive(source, tag, out).wait()
        if out is not None and self._last_out.fill(out, tag, frame):
            return out
        received_tag, communicator, description, data = small_value(frame)
        if received_tag != tag or communicator != self._communicator:
            is_other = communicator != self._communicator
            raise wrong_message(tag, received_tag, source, self.rank, is_other)
        value = decoded_small(description, data, out, self.device)
        if out is not None and value is out:
            self._last_out.set(out, tag, frame, len(frame) - len(data))
        return value if out is None or value is out else copy_into(out, value)

    def _receive(self, source: int | None, tag: int, out: Any = None) -> Transfer:
        if source is None:
            return DONE
        receive = Receive(tag, self._communicator)
        if source == self.rank:
            self._to_itself.receive(receive)
            return Transfer(partial(self._end_own_receive, receive, out))
        if self.device.holds(out) and out.flags.c_contiguous:
            receive.description, (receive.lent_memory,) = encoded(out, self.device, "out")
        elif is_array(out, HOST) and out.flags.c_contiguous and out.flags.writeable:
            receive.description, (memory,) = encoded(out, self.device, "out")
            receive.memory = np.frombuffer(memory, np.uint8) if len(memory) else None
        self._connections.receive_message(source, receive)
        return Transfer(partial(self._end_receive, source, receive, out))

    def _exchange(
        self, parts: Mapping[int, Any], tag: int, into: Mapping[int, Array] = {}
    ) -> list[Any]:
        """Send values to some ranks, and return the values that these ranks sent, by rank.

        `into` has memory for some of the arrays.
        """
        order = sorted(parts, key=lambda rank: (rank - self.rank) % self.size)
        sent = [self._send(parts[rank], rank, tag) for rank in order]
        received = {rank: self._receive(rank, tag, into.get(rank)) for rank in order}
        values = [received[rank].wait() for rank in sorted(received)]
        for message in sent:
            message.wait()
        return values

    def _end_receive(self, source: int, receive: Receive, out: Any) -> Any:
        """Wait for a message of another rank; return its value."""
        self._connections.wait_for_message(source, receive, _receive_call(receive.tag, source))
        arrival = self._checked(receive, source)
        is_there = arrival.data is receive.memory
        if arrival.lent is not None:
            is_there = receive.lent_memory is not None and arrival.lent[0] is receive.lent_memory
        if out is not None and is_there:
            return out
        value = decoded(arrival.description, arrival.data, self.device, arrival.lent)
        receive.arrival = None  # the value may be large
        return value if out is None else copy_into(out, value)

    def _end_own_receive(self, receive: Receive, out: Any) -> Any:
        """Return the value of a message that this rank has sent to itself."""
        if receive.arrival is None:
            with suppress(ValueError):
                self._to_itself.receives.remove(receive)
            raise SectionError(
                f"expected a message of rank {self.rank} to itself, got none. Call ctx.isend or "
                f"ctx.sendrecv before ctx.recv."
            )
        value = self._checked(receive, self.rank).data
        return value if out is None else copy_into(out, value)

    def _checked(self, receive: Receive, source: int) -> Arrival:
        arrival = receive.arrival
        assert arrival is not None, "it is here"
        is_other = arrival.communicator != receive.communicator
        if is_other or arrival.tag != receive.tag:
            raise wrong_message(receive.tag, arrival.tag, source, self.rank, is_other)
        return arrival


class Transfer:
    """A message in transit, from `isend` or `irecv`."""

    def __init__(self, end: Callable[[], Any] | None = None) -> None:
        self._end, self._value = end, None

    def wait(self) -> Any:
        """Wait for the message.

        Returns
        -------
        object
            The received value; None for `isend`: the value that is sent may change now.

        Raises
        ------
        InputError
            If `out` has another shape or dtype than the value.
        SectionError
            If the ranks made different calls.
        """
        if self._end is not None:
            self._value = self._end()
            self._end = None
        return self._value


#: A message that needs no wait.
DONE = Transfer()


def copy_into(out: Any, value: Any) -> Any:
    """Copy a received value into `out`. Raises `InputError` for another shape or dtype."""
    if not hasattr(value, "dtype"):
        raise InputError(
            f"out: expected no array for a message that is no array, got out= and a message of "
            f"type {type(value).__name__}. Leave out out=."
        )
    kind, received = ((getattr(a, "shape", None), getattr(a, "dtype", None)) for a in (out, value))
    if kind != received:
        raise InputError(
            f"out: expected an array of shape {received[0]} and dtype {received[1]}, like the "
            f"message, got {kind[0]} and {kind[1]}. Leave out out= for a new array."
        )
    out[...] = value
    return out


def wrong_message(
    expected_tag: int, actual_tag: int, source: int, rank: int, is_other: bool
) -> SectionError:
    """Return the error for a message with another tag, or of another communicator."""
    received = _receive_call(expected_tag, source)
    if is_other:
        return SectionError(
            f"expected a message of rank {source} for {received}, got one of another communicator. "
            f"Send and receive by the same one: ctx, or the same ctx.along(axis)."
        )
    sent = CALL_NAMES.get(actual_tag, f"send(dest={rank}, tag={actual_tag})")
    return SectionError(
        f"expected messages in the same order on both ranks, but rank {rank} called {received} for "
        f"{sent} of rank {source}. Receive messages in the order of the sends."
    )


def _receive_call(tag: int, source: int) -> str:
    return CALL_NAMES.get(tag, f"recv(source={source}, tag={tag})")


# Checks of the arguments of calls.


def checked_rank(name: str, rank: Any, size: int) -> int | None:
    """Return a rank or None. Raises `InputError` for others."""
    if type(rank) is int and 0 <= rank < size:
        return rank
    number = None if rank is None else as_integer(rank, -1)
    if number is not None and number not in range(size):
        raise InputError(
            f"{name}: expected a rank below {size}, got {rank!r}. Give a rank, "
            f"(ctx.rank + 1) % ctx.size for a ring, or None for no message."
        )
    return number


def checked_root(root: Any, size: int) -> int:
    """Return the rank that sends or gets a value. Raises `InputError` for others."""
    number = -1 if isinstance(root, bool) else as_integer(root, -1)
    if number not in range(size):
        raise InputError(
            f"root: expected a rank below {size}, got {root!r}. Give the ctx.rank that "
            f"sends or gets the value, such as 0."
        )
    return number


def check_parts(parts: Any, size: int) -> None:
    """Refuse anything but a sequence with a value for each rank: `InputError`."""
    count = len(parts) if hasattr(parts, "__len__") else 0
    if count != size or isinstance(parts, dict):
        raise InputError(
            f"parts: expected a list with a value for each of {size} ranks, got {count} "
            f"in {type(parts).__name__}. Give one for each rank, also for this one."
        )


def checked_tag(tag: Any) -> int:
    """Return the tag of a message. Raises `InputError` for others."""
    if type(tag) is int and 0 <= tag < MOST_TAG:
        return tag
    number = as_integer(tag, -1)
    if number not in range(MOST_TAG):
        raise InputError(f"tag: expected an integer from 0 to {MOST_TAG - 1}, got {tag!r}.")
    return number
