"""Options: the ``p2p`` part of Dask's configuration, read in this place only.

Workers do not see what a client sets later with `dask.config.set`: the options that a task
needs are read when its graph is built, and travel with it as an `Options` value. What concerns a
worker itself, and all whom it serves, it reads from its own configuration.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any, TypeVar

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dask_p2p.errors import ConfigError
from dask_p2p.versioned import versioned

__all__ = [
    "MODES",
    "PRODUCER_STREAMS",
    "TRANSPORTS",
    "Options",
    "checked_options",
    "ensure_defaults",
    "options",
]

MODES = ("async", "sync")
PRODUCER_STREAMS = ("any", "default")
TRANSPORTS = ("ipc", "cma", "ucx", "pinned", "comm")

# Best first, by kind of block, as measured. Between processes of one host with two cores and NumPy
# blocks Dask's own TCP takes twice as long as cma, and UCX 1.3 to 2 times as long as that.
_BEST = {"cupy": ("ipc", "ucx", "pinned", "comm"), "numpy": ("cma", "comm")}

_T = TypeVar("_T")


@versioned(defaults=lambda: options())
@dataclass(frozen=True, slots=True)
class Options:
    """What a task needs to know; made by `options`."""

    mode: str
    low_latency: bool
    attempts: int
    checksum: bool
    producer_streams: str
    staging_limit_bytes: int
    transports: tuple[str, ...] | None
    comm_part_bytes: int
    comm_parts_in_flight: int
    ipc_staging_bytes: int
    cma_part_bytes: int
    board_wait_s: float
    board_retain_s: float
    ucx_part_bytes: int
    ucx_host_part_bytes: int
    ucx_parts_in_flight: int
    ucx_allow_unencrypted: bool
    pinned_part_bytes: int
    request_timeout_s: float
    backoff_s: float

    @property
    def any_producer_stream(self) -> bool:
        """Whether blocks may have been written on other streams than CUDA's default ones."""
        return self.producer_streams == "any"

    def order(self, kind: str) -> tuple[str, ...]:
        """Return the transports to try for blocks of a kind ("numpy", "cupy"), best first."""
        if self.transports is not None:
            return self.transports
        # Who wants checksums of NumPy blocks has them, though cma has none.
        return tuple(name for name in _BEST[kind] if not (self.checksum and name == "cma"))


def ensure_defaults() -> None:
    """Put the package's defaults under the user's configuration. Idempotent."""
    dask.config.update_defaults(_load_defaults())


def _load_defaults() -> dict[str, Any]:
    path = os.path.join(os.path.dirname(__file__), "p2p.yaml")
    with open(path) as file:
        defaults: dict[str, Any] = yaml.safe_load(file)
    return defaults


@cache
def _defaults_by_name() -> dict[str, Any]:
    return dict(_by_name(_load_defaults()))


def _by_name(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full name and the value of each option, ``p2p.memory.staging-limit``."""
    for part, value in tree.items():
        name = prefix + str(part).replace("_", "-")  # Dask takes one for the other
        if isinstance(value, Mapping):
            yield from _by_name(value, f"{name}.")
        else:
            yield name, value


def checked_options() -> Options:
    """Read the options for a user's call: as `options`, and refuse names that are no option's.

    Workers do not refuse them: a configuration may be shared with other versions of the package.

    Raises
    ------
    ConfigError
        If there is no option of a name that is set, or one has a value that it cannot have.
    """
    known = _defaults_by_name()
    for name, value in _by_name({"p2p": dask.config.get("p2p", {})}):
        empty_section = value is None and any(other.startswith(f"{name}.") for other in known)
        if name not in known and not empty_section:
            raise ConfigError(
                f"expected the name of an option, got {name}; the nearest is "
                f"{_nearest(name, known)}. Correct it where it is set: in a Dask configuration "
                f"file, by dask.config.set or by an environment variable."
            )
    return options()


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like another, as a whole and in its last part."""

    def likeness(other: str) -> float:
        pairs = [(name, other), (name.split(".")[-1], other.split(".")[-1])]
        return sum(SequenceMatcher(None, *pair).ratio() for pair in pairs)

    of_section = [other for other in known if other.startswith(f"{name}.")]
    return max(of_section or known, key=likeness)


def options() -> Options:
    """Read the options that travel with tasks.

    Raises
    ------
    ConfigError
        If an option has a value that it cannot have.
    """
    return Options(
        mode=_read("mode", _one_of(MODES)),
        low_latency=_read("low-latency", _yes_or_no),
        attempts=_read("attempts", _positive_int),
        checksum=_read("checksum", _yes_or_no),
        producer_streams=_read("producer-streams", _one_of(PRODUCER_STREAMS)),
        staging_limit_bytes=_read("memory.staging-limit", _positive_bytes),
        transports=_read("transports.order", _transports),
        comm_part_bytes=_read("transports.comm.part-bytes", _positive_bytes),
        comm_parts_in_flight=_read("transports.comm.parts-in-flight", _positive_int),
        ipc_staging_bytes=_read("transports.ipc.staging-bytes", _bytes),
        cma_part_bytes=_read("transports.cma.part-bytes", _positive_bytes),
        board_wait_s=_read("transports.board.wait", _seconds),
        board_retain_s=_read("transports.board.retain", _seconds),
        ucx_part_bytes=_read("transports.ucx.part-bytes", _positive_bytes),
        ucx_host_part_bytes=_read("transports.ucx.host-part-bytes", _positive_bytes),
        ucx_parts_in_flight=_read("transports.ucx.parts-in-flight", _positive_int),
        ucx_allow_unencrypted=_read("transports.ucx.allow-unencrypted", _yes_or_no),
        pinned_part_bytes=_read("transports.pinned.part-bytes", _positive_bytes),
        request_timeout_s=_read("timeouts.request", _seconds),
        backoff_s=_read("timeouts.backoff", _seconds),
    )


def _read(name: str, parse: Callable[[Any], _T]) -> _T:
    # Dask drops a section's other defaults where the section is set as a whole.
    value = dask.config.get(f"p2p.{name}", _defaults_by_name()[f"p2p.{name}"])
    try:
        return parse(value)
    except (TypeError, ValueError, KeyError) as exc:
        raise ConfigError(
            f"option p2p.{name} is {value!r}: {exc}. Set it in a Dask configuration file, by "
            f"dask.config.set({{'p2p.{name}': ...}}) or by an environment variable."
        ) from exc


def _one_of(names: tuple[str, ...]) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return str(value)

    return parse


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _positive_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("expected a whole number of at least 1")
    return value


def _positive_bytes(value: Any) -> int:
    size_bytes = _bytes(value)
    if size_bytes < 1:
        raise ValueError("expected a size of at least one byte, like '16 MiB'")
    return size_bytes


def _bytes(value: Any) -> int:
    try:
        size_bytes = int(parse_bytes(value))
    except (ValueError, AttributeError):
        size_bytes = -1
    if size_bytes < 0:
        raise ValueError("expected a size, like '16 MiB'")
    return size_bytes


def _seconds(value: Any) -> float:
    try:
        seconds = float(parse_timedelta(value))
    except (ValueError, AttributeError, KeyError):
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError("expected a duration of at least zero, like '50 ms'")
    return seconds


def _transports(value: Any) -> tuple[str, ...] | None:
    if value == "auto":
        return None
    if not isinstance(value, (list, tuple)) or not all(name in TRANSPORTS for name in value):
        raise ValueError(f"expected auto, or a list of names out of {', '.join(TRANSPORTS)}")
    if not value:
        raise ValueError("expected auto, or at least one name: comm alone, for example")
    # comm works between any two workers: without a last resort a task could not end.
    return tuple(dict.fromkeys([*value, "comm"]))
