"""Options: the ``p2p`` part of Dask's configuration, read in this place only.

Workers do not see what a client sets later with `dask.config.set`: the options that a task
needs are read when its graph is built, and travel with it as an `Options` value. What concerns a
worker itself, and all whom it serves, it reads from its own configuration.

What belongs to one transport is read by its module: it declares a `Section`, and its name and rank
with `register_transport`. All that call `options` have imported the transports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import SequenceMatcher
from functools import cache
from typing import Any, ClassVar, TypeVar

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dask_p2p.errors import ConfigError
from dask_p2p.types import Kind
from dask_p2p.versioned import versioned

__all__ = [
    "MODES",
    "NOT_IN_AUTO",
    "PRODUCER_STREAMS",
    "Options",
    "Section",
    "checked_options",
    "duration_s",
    "ensure_defaults",
    "installs_with_preload",
    "option",
    "options",
    "positive_bytes",
    "positive_int",
    "register_transport",
    "section",
    "size_bytes",
    "yes_or_no",
]

MODES = ("async", "sync")
#: Rank of a transport that is used only where it is named.
NOT_IN_AUTO = float("inf")
PRODUCER_STREAMS = ("any", "default")
_T = TypeVar("_T")
_S = TypeVar("_S", bound="Section")


@versioned(defaults=lambda: options())
@dataclass(frozen=True, slots=True)
class Options:
    """What a task needs to know; made by `options`."""

    mode: str
    low_latency: bool
    attempts: int
    groups: int | None  # 0: none; None: as many as seem best
    passes: int | None  # 1 or 2; None: as many as seem best
    checksum: bool
    producer_streams: str
    staging_limit_bytes: int
    retain_outputs_s: float
    transports: tuple[str, ...] | None
    request_timeout_s: float
    backoff_s: float
    log_runs: bool
    nvtx: bool
    sections: tuple[Section, ...]  # of transports, one of a class

    @property
    def any_producer_stream(self) -> bool:
        """Whether blocks may have been written on other streams than CUDA's default ones."""
        return self.producer_streams == "any"

    def order(self, kind: Kind) -> tuple[str, ...]:
        """Return the transports to try for blocks of a kind ("numpy", "cupy"), best first."""
        if self.transports is not None:
            return self.transports
        ranks = [(rank(kind, self), name) for name, rank in _known.items()]
        return tuple(name for rank, name in sorted(ranks) if rank < NOT_IN_AUTO)


_known: dict[str, Callable[[str, Options], float]] = {}  # ranks of transports by their names
_sections: dict[str, type[Section]] = {}  # by name in the configuration


def register_transport(name: str, rank: Callable[[str, Options], float]) -> None:
    """Let a transport be named in ``p2p.transports.order``, and be used where that is auto.

    Parameters
    ----------
    name
        Of the transport.
    rank
        Returns its place among those of the order auto for a kind of blocks, the least first; or
        `NOT_IN_AUTO`.
    """
    _known[name] = rank


class Section:
    """Options of one transport. Subclasses are dataclasses, decorated with `section`."""

    name: ClassVar[str]  # in the configuration, without ``p2p.``

    @classmethod
    def of(cls: type[_S], options: Options) -> _S:
        """Return what came with `options`; from another version of the package, this process' own.

        Raises
        ------
        ConfigError
            If it has to be read, and has a value that it cannot have.
        """
        for given in options.sections:
            if type(given) is cls:
                return given
        return cls.configured()

    @classmethod
    def configured(cls: type[_S]) -> _S:
        """Read it from the configuration; `ConfigError` if a value is wrong."""
        values = {
            known.name: _read(f"{cls.name}.{known.metadata['option']}", known.metadata["parse"])
            for known in fields(cls)  # type: ignore[arg-type]
        }
        return cls(**values)


def section(name: str) -> Callable[[type[_S]], type[_S]]:
    """Have a subclass of `Section` read from this part of the configuration, and travel."""

    def decorate(cls: type[_S]) -> type[_S]:
        cls.name = name
        _sections[name] = cls
        return versioned(defaults=cls.configured)(cls)

    return decorate


def option(name: str, parse: Callable[[Any], _T]) -> _T:
    """Declare a field of a `Section`: its name in the configuration, and how it is read."""
    declared: _T = field(metadata={"option": name, "parse": parse})
    return declared


_FORMER_NAMES = {
    f"p2p.transports.board.{name}": f"p2p.transports.directory.{name}"
    for name in ("wait", "retain")
}


def ensure_defaults() -> None:
    """Put the package's defaults under the user's configuration. Idempotent."""
    dask.config.deprecations.update(_FORMER_NAMES)
    dask.config.rename(_FORMER_NAMES)
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
    """Return the first name of a section, or the one most like another in all or its last part."""

    def likeness(other: str) -> float:
        pairs = [(name, other), (name.split(".")[-1], other.split(".")[-1])]
        return sum(SequenceMatcher(None, *pair).ratio() for pair in pairs)

    of_section = [other for other in known if other.startswith(f"{name}.")]
    return of_section[0] if of_section else max(known, key=likeness)


def options() -> Options:
    """Read the options that travel with tasks.

    Raises
    ------
    ConfigError
        If an option has a value that it cannot have.
    """
    return Options(
        mode=_read("mode", _one_of(MODES)),
        low_latency=_read("low-latency", yes_or_no),
        attempts=_read("attempts", positive_int),
        groups=_read("groups", _groups),
        passes=_read("passes", _passes),
        checksum=_read("checksum", yes_or_no),
        producer_streams=_read("producer-streams", _one_of(PRODUCER_STREAMS)),
        staging_limit_bytes=_read("memory.staging-limit", positive_bytes),
        retain_outputs_s=_read("memory.retain-outputs", duration_s),
        transports=_read("transports.order", _transports),
        request_timeout_s=_read("timeouts.request", duration_s),
        backoff_s=_read("timeouts.backoff", duration_s),
        log_runs=_read("log-runs", yes_or_no),
        nvtx=_read("nvtx", yes_or_no),
        sections=tuple(known.configured() for known in _sections.values()),
    )


def installs_with_preload() -> bool:
    """Tell whether `dask_p2p.preload` is to call `dask_p2p.install`.

    Raises
    ------
    ConfigError
        If ``p2p.install`` is neither true nor false.
    """
    return _read("install", yes_or_no)


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


def yes_or_no(value: Any) -> bool:
    """Read a truth value; `ValueError` if it is none."""
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def positive_int(value: Any) -> int:
    """Read a whole number of at least 1; `ValueError` if it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("expected a whole number of at least 1")
    return value


def positive_bytes(value: Any) -> int:
    """Read a size of at least one byte; `ValueError` if it is none."""
    nbytes = size_bytes(value)
    if nbytes < 1:
        raise ValueError("expected a size of at least one byte, like '16 MiB'")
    return nbytes


def size_bytes(value: Any) -> int:
    """Read a size, in bytes; `ValueError` if it is none."""
    try:
        nbytes = int(parse_bytes(value))
    except (ValueError, AttributeError):
        nbytes = -1
    if nbytes < 0:
        raise ValueError("expected a size, like '16 MiB'")
    return nbytes


def duration_s(value: Any) -> float:
    """Read a duration, in seconds; `ValueError` if it is none."""
    try:
        seconds = float(parse_timedelta(value))
    except (ValueError, AttributeError, KeyError):
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError("expected a duration of at least zero, like '50 ms'")
    return seconds


def _groups(value: Any) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("expected auto, or a number of groups; 0 for none")
    return value


def _passes(value: Any) -> int | None:
    if value not in ("auto", 1, 2) or isinstance(value, bool):
        raise ValueError("expected auto, 1 or 2")
    return None if value == "auto" else int(value)


def _transports(value: Any) -> tuple[str, ...] | None:
    if value == "auto":
        return None
    if not isinstance(value, (list, tuple)) or not all(name in _known for name in value):
        raise ValueError(f"expected auto, or a list of names out of {', '.join(_known)}")
    if not value:
        raise ValueError("expected auto, or at least one name: comm alone, for example")
    # comm works between any two workers: without a last resort a task could not end.
    return tuple(dict.fromkeys([*value, "comm"]))
