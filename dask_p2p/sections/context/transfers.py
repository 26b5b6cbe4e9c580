"""Messages in transit: those that a rank has begun to send or to receive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_p2p.errors import InputError, SectionError
from dask_p2p.sections.exchange.values import decoded
from dask_p2p.sections.wire.messages.format import CALL_NAMES, SentMessage
from dask_p2p.sections.wire.messages.mailbox import Receive

if TYPE_CHECKING:
    from dask_p2p.sections.context.messages import Messaging


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
        self._found: tuple[Any] | None = None

    def wait(self) -> Any:
        if self._found is None:
            self._found = (self._value(),)
        return self._found[0]

    def _value(self) -> Any:
        messages, source, receive = self._messages, self._source, self._receive
        call = _receive_call(receive.tag, source)
        messages._connections.wait_for_message(source, receive, call)
        arrival = receive.arrival
        assert arrival is not None
        found, wanted = arrival.tag, receive.tag
        if (found, arrival.communicator) != (wanted, receive.communicator):
            is_other = arrival.communicator != receive.communicator
            raise wrong_message(wanted, found, source, messages.rank, is_other)
        is_there = arrival.data is receive.memory
        if arrival.lent is not None:
            is_there = receive.lent_memory is not None and arrival.lent[0] is receive.lent_memory
        if self._out is not None and is_there:
            return self._out
        value = decoded(arrival.description, arrival.data, messages.device, arrival.lent)
        receive.arrival = None  # the value may be large
        return value if self._out is None else copied_into(self._out, value)


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
        return value if self._out is None else copied_into(self._out, value)


def copied_into(out: Any, value: Any) -> Any:
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
    wanted: int, found: int, source: int, rank: int, is_other: bool = False
) -> SectionError:
    """Return the error for a message with another tag, or of another communicator."""
    received = _receive_call(wanted, source)
    if is_other:
        return SectionError(
            f"expected a message of rank {source} for {received}, got one of another communicator. "
            f"Send and receive by the same one: ctx, or the same ctx.split()."
        )
    sent = _call_of(found, f"send(dest={rank}, tag={found})")
    return SectionError(
        f"expected messages in the same order on both ranks, but rank {rank} called {received} for "
        f"{sent} of rank {source}. Receive messages in the order of the sends."
    )


def _receive_call(tag: int, source: int) -> str:
    return _call_of(tag, f"recv(source={source}, tag={tag})")


def _call_of(tag: int, otherwise: str) -> str:
    return CALL_NAMES.get(tag, otherwise)
