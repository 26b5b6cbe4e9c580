"""Messages between two ranks: `send` and `recv` of MPI, and calls that consist of messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p import tuning
from dask_p2p.errors import InputError, SectionError
from dask_p2p.inputs import as_integer, nearest_name
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
    CALL_TAGS,
    MOST_TAG,
    SentMessage,
    offer_message,
    small_value,
    value_message,
)
from dask_p2p.sections.wire.mailbox import Receive
from dask_p2p.types import Array

#: Names of mpi4py that are others here, not in lower case alone.
_OF_MPI = {
    "Get_rank": "rank",
    "Get_size": "size",
    "Allgatherv": "allgather(value, ragged=True)",
    "Gatherv": "gather(value, ragged=True)",
    "Scatterv": "scatter",
    "Alltoallv": "alltoall",
    "Alltoallw": "alltoall",
    "Ibcast": "bcast",
    "Ssend": "send",
    "Sendrecv_replace": "sendrecv",
    "Cart_create": "grid, the ranks along each axis",
    "Get_coords": "box, the position of the local block",
    "Get_topo": "grid",
    "Shift": "along(axis), whose neighbours are rank - 1 and rank + 1",
    "Sub": "along(axis)",
    "Split": "along(axis)",
    "split": "along(axis)",
    "Split_type": "along(axis)",
}


class Messaging:
    """One rank among several, and its messages to and from the others.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    """

    def __init__(
        self,
        rank: int,  # this rank
        size: int,  # number of ranks
        connections: Connections,  # connections to the other ranks
        device: Host,  # of the arrays; values pass through host memory
    ) -> None:
        self.rank, self.size, self._connections, self.device = rank, size, connections, device
        self.reads_memory = True  # whether ranks of one host may read each other's memory
        self.communicator = 0  # number of this communicator, the same on its ranks
        self._to_itself = deque[tuple[int, Any]]()  # tags and values
        self._from_itself = deque[FromItself]()  # receives that have no message yet
        self._last_out = LastOut()

    if not TYPE_CHECKING:  # type checkers name unknown attributes

        def __getattr__(self, name: str) -> Any:
            names = [*(public for public in dir(type(self)) if public[0] != "_"), "rank", "size"]
            remedy = _OF_MPI.get(name, name.lower())
            if remedy.partition("(")[0].partition(",")[0] not in [*names, "grid", "box"]:
                remedy = nearest_name(name, names)
            raise AttributeError(
                f"expected an attribute of the context, got {name!r}. Use ctx.{remedy}.", name=name
            )

    def send(self, value: Any, dest: int | None, tag: int = 0) -> None:
        """Send a value to another rank, which receives it by `recv`.

        The call returns when `value` may change: it may wait until the other rank receives a large
        value. Two ranks that send to each other at the same time do not wait for each other.

        Parameters
        ----------
        value : object
            Any object that can be pickled. Numbers, arrays, and tuples and dicts of these are sent
            without a pickle.
        dest : int or None
            The rank that receives the value. None sends nothing: beyond the end of a line of ranks.
        tag : int, optional
            A number that `recv` has to give as well. By default 0.

        Raises
        ------
        InputError
            If there is no such rank, or `value` cannot be pickled, or `tag` is no tag.
        SectionError
            If the ranks made different calls.
        """
        self._sent(value, self._checked_rank("dest", dest), _checked_tag(tag)).wait()

    def isend(self, value: Any, dest: int | None, tag: int = 0) -> Transfer:
        """Begin to send a value, without waiting. Parameters and errors are those of `send`.

        Returns
        -------
        Transfer
            The value may change after its ``wait()``.
        """
        return self._sent(value, self._checked_rank("dest", dest), _checked_tag(tag))

    def recv(self, source: int | None, tag: int = 0, *, out: Array | None = None) -> Any:
        """Receive the next value that another rank has sent to this one.

        Messages of one rank arrive in the order of its sends.

        Parameters
        ----------
        source : int or None
            The rank that sends the value. None receives nothing, and returns None.
        tag : int, optional
            The tag of the message. It is compared: a rank cannot receive messages in another order.
        out : array, optional
            Memory for the value, an array of its shape and dtype. By default a new array.

        Returns
        -------
        object
            The value, owned by the caller, of the type that was sent: `out` if that is given.

        Raises
        ------
        InputError
            If there is no such rank, or `out` has another shape or dtype than the value.
        SectionError
            If the next message has another tag, or the other rank makes a call of all ranks, or
            has returned.
        """
        return self._next(self._checked_rank("source", source), _checked_tag(tag), out)

    def irecv(self, source: int | None, tag: int = 0, *, out: Array | None = None) -> Transfer:
        """Begin to receive a value, without waiting. Parameters and errors are those of `recv`.

        Returns
        -------
        Transfer
            Its ``wait()`` returns the value.
        """
        return self._received(self._checked_rank("source", source), _checked_tag(tag), out)

    def sendrecv(
        self,
        value: Any,
        dest: int | None,
        source: int | None,
        tag: int = 0,
        *,
        out: Array | None = None,
    ) -> Any:
        """Send a value to one rank, and receive one from the same or another rank.

        Parameters and errors are those of `send` and `recv`.

        Returns
        -------
        object
            The received value; None if `source` is None.
        """
        to, source_rank = self._checked_rank("dest", dest), self._checked_rank("source", source)
        sent = self._sent(value, to, _checked_tag(tag))
        received = self._next(source_rank, _checked_tag(tag), out)
        sent.wait()
        return received

    def alltoall(self, parts: Sequence[Any]) -> list[Any]:
        """Send a value to each rank, and receive one from each.

        Parameters
        ----------
        parts : sequence
            A value for each rank, in order of rank, as for `send`: arrays may have any length.

        Returns
        -------
        list
            The values that the ranks sent to this one, in order of rank.

        Raises
        ------
        InputError
            If `parts` has another length than `size`, or a value cannot be pickled.
        SectionError
            If the ranks made different calls.
        """
        self._check_parts("parts", parts)
        return self._exchanged(dict(enumerate(parts)), CALL_TAGS["alltoall()"])

    def _exchanged(
        self, parts: Mapping[int, Any], tag: int, into: Mapping[int, Array] = {}
    ) -> list[Any]:
        """Send values to some ranks, and return the values that these ranks sent, by rank.

        `into` has memory for some of the arrays.
        """
        order = sorted(parts, key=lambda rank: (rank - self.rank) % self.size)
        sent = [self._sent(parts[rank], rank, tag) for rank in order]
        received = {rank: self._received(rank, tag, into.get(rank)) for rank in order}
        values = [received[rank].wait() for rank in sorted(received)]
        for message in sent:
            message.wait()
        return values

    def _check_parts(self, name: str, parts: Any) -> None:
        count = len(parts) if hasattr(parts, "__len__") else 0
        if count != self.size or isinstance(parts, dict):
            raise InputError(
                f"{name}: expected a list with a value for each of {self.size} ranks, got {count} "
                f"in {type(parts).__name__}. Give one for each rank, also for this one."
            )

    def cancel_receive(self, received: FromItself) -> None:
        """Forget a receive from this rank itself."""
        self._from_itself = deque(
            message for message in self._from_itself if message is not received
        )

    def _checked_rank(self, name: str, rank: Any) -> int | None:
        if type(rank) is int and 0 <= rank < self.size:
            return rank
        number = None if rank is None else as_integer(rank, -1)
        if number is not None and number not in range(self.size):
            raise InputError(
                f"{name}: expected a rank below {self.size}, got {rank!r}. Give a rank, "
                f"(ctx.rank + 1) % ctx.size for a ring, or None for no message."
            )
        return number

    def _sent(self, value: Any, dest: int | None, tag: int) -> Transfer:
        if dest is None:
            return DONE
        if dest == self.rank:
            kept_message = tag, copied(value, self.device)
            if self._from_itself:
                self._from_itself.popleft().message = kept_message
            else:
                self._to_itself.append(kept_message)
            return DONE
        connections = self._connections
        frame = small_frame(value, tag, self.communicator)
        if frame is not None and connections.send_small(dest, frame):
            return DONE
        encoded_value = encoded(value, self.device)
        arrays = encoded_value.on_device
        if arrays and (offer := connections.offer(dest, arrays)) is not None:
            message = offer_message(tag, self.communicator, *encoded_value, arrays, offer)
            connections.send_message(dest, message)
            return Sending(self, dest, message)
        description, parts = encoded_value.on_host(self.device) if arrays else encoded_value
        is_large = self.reads_memory and sum(map(len, parts)) >= tuning.current.read_bytes
        may_read = is_large and not connections.is_on_other_host(dest)
        message = value_message(tag, self.communicator, description, parts, may_read)
        connections.send_message(dest, message)
        return Sending(self, dest, message)

    def _next(self, source: int | None, tag: int, out: Any = None) -> Any:
        if source is None:
            return None
        frame = self._connections.receive_small(source)
        if frame is None:
            return self._received(source, tag, out).wait()
        if out is not None and self._last_out.fill(out, tag, frame):
            return out
        received_tag, communicator, description, data = small_value(frame)
        if received_tag != tag or communicator != self.communicator:
            is_other = communicator != self.communicator
            raise wrong_message(tag, received_tag, source, self.rank, is_other)
        value = decoded_small(description, data, out, self.device)
        if out is not None and value is out:
            self._last_out.set(out, tag, frame, len(frame) - len(data))
        return value if out is None or value is out else copy_into_state(out, value)

    def _received(self, source: int | None, tag: int, out: Any = None) -> Transfer:
        if source is None:
            return DONE
        if source == self.rank:
            received = FromItself(self, tag, out)
            if self._to_itself:
                received.message = self._to_itself.popleft()
            else:
                self._from_itself.append(received)
            return received
        receive = Receive(tag, self.communicator)
        if self.device.holds(out) and out.flags.c_contiguous:
            receive.description, (receive.lent_memory,) = encoded(out, self.device, "out")
        elif is_array(out, HOST) and out.flags.c_contiguous and out.flags.writeable:
            receive.description, (memory,) = encoded(out, self.device, "out")
            receive.memory = np.frombuffer(memory, np.uint8) if len(memory) else None
        self._connections.receive_message(source, receive)
        return Receiving(self, source, receive, out)


def _checked_tag(tag: Any) -> int:
    if type(tag) is int and 0 <= tag < MOST_TAG:
        return tag
    number = as_integer(tag, -1)
    if number not in range(MOST_TAG):
        raise InputError(f"tag: expected an integer from 0 to {MOST_TAG - 1}, got {tag!r}.")
    return number


class Transfer:
    """A message in transit, from `isend` or `irecv`."""

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


#: A message that needs no wait.
DONE = Transfer()


class Sending(Transfer):
    """A message to another rank."""

    def __init__(self, messages: Messaging, dest: int, message: SentMessage) -> None:
        self._messages = messages
        self._dest, self._message = dest, message

    def wait(self) -> None:
        self._messages._connections.wait_for_sent(self._dest, self._message)


class Receiving(Transfer):
    """A message from another rank."""

    def __init__(self, messages: Messaging, source: int, receive: Receive, out: Any) -> None:
        self._messages = messages
        self._source, self._receive, self._out = source, receive, out
        self._result: tuple[Any] | None = None

    def wait(self) -> Any:
        if self._result is None:
            self._result = (self._value(),)
        return self._result[0]

    def _value(self) -> Any:
        messages, source, receive = self._messages, self._source, self._receive
        call = _receive_call(receive.tag, source)
        messages._connections.wait_for_message(source, receive, call)
        arrival = receive.arrival
        assert arrival is not None
        actual_tag, expected_tag = arrival.tag, receive.tag
        if (actual_tag, arrival.communicator) != (expected_tag, receive.communicator):
            is_other = arrival.communicator != receive.communicator
            raise wrong_message(expected_tag, actual_tag, source, messages.rank, is_other)
        is_there = arrival.data is receive.memory
        if arrival.lent is not None:
            is_there = receive.lent_memory is not None and arrival.lent[0] is receive.lent_memory
        if self._out is not None and is_there:
            return self._out
        value = decoded(arrival.description, arrival.data, messages.device, arrival.lent)
        receive.arrival = None  # the value may be large
        return value if self._out is None else copy_into_state(self._out, value)


class FromItself(Transfer):
    """A message that the rank sends to itself."""

    def __init__(self, messages: Messaging, tag: int, out: Any) -> None:
        self._messages = messages
        self._tag, self._out = tag, out
        self.message: tuple[int, Any] | None = None  # tag and value

    def wait(self) -> Any:
        rank = self._messages.rank
        if self.message is None:
            self._messages.cancel_receive(self)
            raise SectionError(
                f"expected a message of rank {rank} to itself, got none. Call ctx.isend or "
                f"ctx.sendrecv before ctx.recv."
            )
        tag, value = self.message
        if tag != self._tag:
            raise wrong_message(self._tag, tag, rank, rank)
        return value if self._out is None else copy_into_state(self._out, value)


def copy_into_state(out: Any, value: Any) -> Any:
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
    expected_tag: int, actual_tag: int, source: int, rank: int, is_other: bool = False
) -> SectionError:
    """Return the error for a message with another tag, or of another communicator."""
    received = _receive_call(expected_tag, source)
    if is_other:
        return SectionError(
            f"expected a message of rank {source} for {received}, got one of another communicator. "
            f"Send and receive by the same one: ctx, or the same ctx.along(axis)."
        )
    sent = _call_of(actual_tag, f"send(dest={rank}, tag={actual_tag})")
    return SectionError(
        f"expected messages in the same order on both ranks, but rank {rank} called {received} for "
        f"{sent} of rank {source}. Receive messages in the order of the sends."
    )


def _receive_call(tag: int, source: int) -> str:
    return _call_of(tag, f"recv(source={source}, tag={tag})")


def _call_of(tag: int, otherwise: str) -> str:
    return CALL_NAMES.get(tag, otherwise)
