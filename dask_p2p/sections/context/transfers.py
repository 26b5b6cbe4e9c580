"""Messages in transit: those that a rank has begun to send or to receive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_p2p.errors import InputError, SectionError
from dask_p2p.sections.exchange.values import decoded
from dask_p2p.sections.wire.mailbox import CALL_NAMES, Receive, SentMessage

if TYPE_CHECKING:
    from dask_p2p.sections.context.messages import Messaging


class Transfer:
    """A message in transit, from `isend` or `irecv`."""

    def __init__(self, messages: Messaging) -> None:
        self._messages = messages

    def wait(self) -> Any:
        """Wait for the message.

        Returns
        -------
        number, array, tuple, dict or None
            The received value; None for `isend`: the value that is sent may change now.

        Raises
        ------
        InputError
            If `out` has another shape or dtype than the value.
        SectionError
            If the ranks made different calls.
        """


class Sending(Transfer):
    """A message to another rank."""

    def __init__(self, messages: Messaging, dest: int, message: SentMessage) -> None:
        super().__init__(messages)
        self._dest, self._message = dest, message

    def wait(self) -> None:
        self._messages._connections.wait_for_sent(self._dest, self._message)


class Receiving(Transfer):
    """A message from another rank."""

    def __init__(self, messages: Messaging, source: int, receive: Receive, out: Any) -> None:
        super().__init__(messages)
        self._source, self._receive, self._out = source, receive, out
        self._found: tuple[Any] | None = None

    def wait(self) -> Any:
        if self._found is None:
            self._found = (self._value(),)
        return self._found[0]

    def _value(self) -> Any:
        messages, source, receive = self._messages, self._source, self._receive
        call = _call_of(receive.tag, f"recv(source={source}, tag={receive.tag})")
        messages._connections.wait_for_message(source, receive, call)
        arrival = receive.arrival
        assert arrival is not None
        if arrival.communicator != receive.communicator:
            raise SectionError(
                f"expected a message of rank {source} for {call}, got one of another "
                f"communicator. Send and receive by the same one: ctx, or the same ctx.split()."
            )
        _check_tag(receive.tag, arrival.tag, source, messages.rank)
        if self._out is not None and arrival.data is receive.memory:
            return self._out
        value = decoded(arrival.description, arrival.data, messages.device)
        receive.arrival = None  # the value may be large
        return value if self._out is None else _copied_into(self._out, value)


class FromItself(Transfer):
    """A message that the rank sends to itself."""

    def __init__(self, messages: Messaging, tag: int, out: Any) -> None:
        super().__init__(messages)
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
        _check_tag(self._tag, tag, rank, rank)
        return value if self._out is None else _copied_into(self._out, value)


def _copied_into(out: Any, value: Any) -> Any:
    wanted = getattr(out, "shape", None), getattr(out, "dtype", None)
    found = getattr(value, "shape", type(value).__name__), getattr(value, "dtype", None)
    if wanted != found:
        raise InputError(
            f"out: expected an array of shape {found[0]} and dtype {found[1]}, like the message, "
            f"got {wanted[0]} and {wanted[1]}. Leave out out= for a new array."
        )
    out[...] = value
    return out


def _check_tag(wanted: int, found: int, source: int, rank: int) -> None:
    if wanted != found:
        sent = _call_of(found, f"send(dest={rank}, tag={found})")
        received = _call_of(wanted, f"recv(source={source}, tag={wanted})")
        raise SectionError(
            f"expected messages in the same order on both ranks, but rank {rank} called "
            f"{received} for {sent} of rank {source}. Receive messages in the order of the sends."
        )


def _call_of(tag: int, otherwise: str) -> str:
    return CALL_NAMES.get(tag, otherwise)
