"""Messages between two ranks: `send` and `recv` of MPI, and calls that consist of messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from dask_p2p.errors import InputError, SectionError
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.values import copied, decoded, encoded
from dask_p2p.sections.wire.connections import Connections
from dask_p2p.sections.wire.mailbox import Receive, SentMessage, sent_message
from dask_p2p.types import Array

_MOST_TAG = 2**32
# Tags of calls that consist of messages, by name.
CALL_TAGS = {
    "alltoall()": _MOST_TAG,
    "gather(ragged=True)": _MOST_TAG + 1,
    "allgather(ragged=True)": _MOST_TAG + 2,
    "scatter()": _MOST_TAG + 3,
    "bcast()": _MOST_TAG + 4,
}
_NAMES = {tag: name for name, tag in CALL_TAGS.items()}


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

    def send(self, value: Any, dest: int | None, tag: int = 0) -> None:
        """Send a value to another rank, which receives it by `recv`.

        The call returns when `value` may change: it may wait until the other rank receives a large
        value. Two ranks that send to each other at the same time do not wait for each other.

        Parameters
        ----------
        value : number, array, tuple or dict
            Numbers, arrays of numbers, or tuples and dicts of these. The dtypes and shapes of the
            arrays come along.
        dest : int or None
            The rank that receives the value. None sends nothing: beyond the end of a line of ranks.
        tag : int, optional
            A number that `recv` has to give as well. By default 0.

        Raises
        ------
        InputError
            If there is no such rank, or `value` holds anything but numbers, or `tag` is no tag.
        SectionError
            If the ranks made different calls.
        UnsupportedArrayError
            If an array is masked.
        """
        self.isend(value, dest, tag).wait()

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
        number, array, tuple or dict
            The value, owned by the caller: `out` if that is given. Python's numbers, and those of
            NumPy, keep their types.

        Raises
        ------
        InputError
            If there is no such rank, or `out` has another shape or dtype than the value.
        SectionError
            If the next message has another tag, or the other rank makes a call of all ranks, or
            has returned.
        """
        return self.irecv(source, tag, out=out).wait()

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
        number, array, tuple or dict
            The received value; None if `source` is None.
        """
        to, of = self._checked_rank("dest", dest), self._checked_rank("source", source)
        sent = self._sent(value, to, _checked_tag(tag))
        received = self._received(of, tag, out).wait()
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
            If `parts` has another length than `size`, or a value holds anything but numbers.
        SectionError
            If the ranks made different calls.
        """
        self._check_parts("parts", parts)
        return self._exchanged(parts, CALL_TAGS["alltoall()"])

    def _exchanged(self, parts: Sequence[Any], tag: int) -> list[Any]:
        """Send a value to each rank, and return the values that they sent, by rank."""
        after = [(self.rank + by) % self.size for by in range(self.size)]
        sent = [self._sent(parts[rank], rank, tag) for rank in after]
        found = [self._received(rank, tag) for rank in range(self.size)]
        values = [each.wait() for each in found]
        for each in sent:
            each.wait()
        return values

    def _check_parts(self, name: str, parts: Any) -> None:
        count = len(parts) if hasattr(parts, "__len__") else 0
        if count != self.size or isinstance(parts, dict):
            raise InputError(
                f"{name}: expected a list with a value for each of {self.size} ranks, got {count} "
                f"in {type(parts).__name__}. Give one for each rank, also for this one."
            )

    def _checked_rank(self, name: str, rank: Any) -> int | None:
        try:
            found = None if rank is None else index(rank)
        except TypeError:
            found = -1
        if found is not None and found not in range(self.size):
            raise InputError(
                f"{name}: expected a rank below {self.size}, got {rank!r}. Give a rank, "
                f"(ctx.rank + 1) % ctx.size for a ring, or None for no message."
            )
        return found

    def _sent(self, value: Any, dest: int | None, tag: int) -> Transfer:
        if dest is None:
            return Transfer(self)
        if dest == self.rank:
            self._to_itself.append((tag, copied(value, self.device)))
            return Transfer(self)
        description, parts = encoded(value, self.device)
        connections = self._connections
        may_read = self.reads_memory and not connections.is_on_other_host(dest)
        message = sent_message(tag, self.communicator, description, parts, may_read)
        connections.send_message(dest, message)
        return _Sending(self, dest, message)

    def _received(self, source: int | None, tag: int, out: Any = None) -> Transfer:
        if source is None:
            return Transfer(self)
        if source == self.rank:
            return _FromItself(self, tag, out)
        receive = Receive(tag, self.communicator)
        if isinstance(out, np.ndarray) and out.flags.c_contiguous and out.flags.writeable:
            receive.description, (memory,) = encoded(out, self.device, "out")
            receive.memory = np.frombuffer(memory, np.uint8) if len(memory) else None
        self._connections.receive_message(source, receive)
        return _Receiving(self, source, receive, out)

    def _value_from_itself(self, tag: int) -> Any:
        if not self._to_itself:
            raise SectionError(
                f"expected a message of rank {self.rank} to itself, got none. Call ctx.isend or "
                f"ctx.sendrecv before ctx.recv."
            )
        found, value = self._to_itself.popleft()
        _check_tag(tag, found, self.rank, self.rank)
        return value


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


class _Sending(Transfer):
    def __init__(self, messages: Messaging, dest: int, message: SentMessage) -> None:
        super().__init__(messages)
        self._dest, self._message = dest, message

    def wait(self) -> None:
        self._messages._connections.wait_for_sent(self._dest, self._message)


class _Receiving(Transfer):
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


class _FromItself(Transfer):
    def __init__(self, messages: Messaging, tag: int, out: Any) -> None:
        super().__init__(messages)
        self._tag, self._out = tag, out

    def wait(self) -> Any:
        value = self._messages._value_from_itself(self._tag)
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
    return _NAMES.get(tag, otherwise)


def _checked_tag(tag: Any) -> int:
    try:
        number = index(tag)
    except TypeError:
        number = -1
    if number not in range(_MOST_TAG):
        raise InputError(f"tag: expected an integer from 0 to {_MOST_TAG - 1}, got {tag!r}.")
    return number
