"""Options: the ``p2p`` part of Dask's configuration, read in this module only.

Workers do not receive a client's later `dask.config.set`. A client therefore reads the options of
tasks when it builds their graph, and tasks carry them as an `Options` value. Per-worker settings
are read from the worker's own configuration.

The first read of options looks up the transports in `dask_p2p.transports`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from typing import Any, TypeVar

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dask_p2p.errors import ConfigError
from dask_p2p.inputs import nearest_name
from dask_p2p.shared import shared
from dask_p2p.types import Kind

_T = TypeVar("_T")

# --- readers of values: a `ValueError` names the expected value ---


def parse_bool(value: Any) -> bool:
    """Read a truth value."""
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _parse_fuse(value: Any) -> str:
    # YAML reads the plain words on and off as truth values.
    return _parse_choice("off", "auto", "on")({False: "off", True: "on"}.get(value, value))


def parse_positive_int(value: Any) -> int:
    """Read a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("expected a whole number of at least 1")
    return value


def parse_positive_bytes(value: Any) -> int:
    """Read a size of at least one byte."""
    return int(_parse_number(value, parse_bytes, 1, "a size of at least one byte, like '16 MiB'"))


def size_bytes(value: Any) -> int:
    """Read a size, in bytes."""
    return int(_parse_number(value, parse_bytes, 0, "a size, like '16 MiB'"))


def parse_duration(value: Any) -> float:
    """Read a duration, in seconds."""
    return _parse_number(value, parse_timedelta, 0, "a duration of at least zero, like '50 ms'")


def parse_time_limit(value: Any) -> float:
    """Read a time limit of at least 1 ms, in seconds."""
    return _parse_number(value, parse_timedelta, 1e-3, "a duration of at least 1 ms, like '30 s'")


def _parse_number(value: Any, parse: Callable[[Any], float], least: float, expected: str) -> float:
    with suppress(ValueError, AttributeError, KeyError, TypeError):
        number = float(parse(value))
        if number >= least:
            return number
    raise ValueError(f"expected {expected}")


def _parse_choice(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return str(value)

    return parse


def _parse_groups(value: Any) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("expected auto, or a number of groups (0: no groups)")
    return value


def _parse_size(value: Any) -> int | None:
    return None if value == "auto" else parse_positive_bytes(value)


def _parse_transports(value: Any) -> tuple[str, ...] | None:
    if value == "auto":
        return None
    transport_names = transport_classes()
    if not isinstance(value, (list, tuple)) or not all(name in transport_names for name in value):
        raise ValueError(f"expected auto, or a list of names from {', '.join(transport_names)}")
    if not value:
        raise ValueError("expected auto, or at least one name: comm alone, for example")
    # comm works between any two workers: without this last resort a task might never end.
    return tuple(dict.fromkeys([*value, "comm"]))


# --- the options ---


def option(name: str, parse: Callable[[Any], _T]) -> _T:
    """Declare a field by its name in the configuration and the reader of its value."""
    declared: _T = field(metadata={"option": name, "parse": parse})
    return declared


@shared
@dataclass(frozen=True)
class Options:
    """The options of tasks; made by `options`."""

    attempts: int = option("attempts", parse_positive_int)
    groups: int | None = option("groups", _parse_groups)  # 0: no groups; None: chosen by the graph
    producer_streams: str = option("producer-streams", _parse_choice("any", "default"))
    staging_limit_bytes: int = option("memory.staging-limit", parse_positive_bytes)
    retain_outputs_s: float = option("memory.retain-outputs", parse_duration)
    transports: tuple[str, ...] | None = option("transports.order", _parse_transports)
    part_bytes: int | None = option("transports.part-bytes", _parse_size)  # None: the transport's
    ipc_staging_bytes: int = option("transports.ipc.staging-bytes", size_bytes)
    retain_blocks_s: float = option("transports.directory.retain", parse_duration)
    allow_unencrypted: bool = option("transports.ucx.allow-unencrypted", parse_bool)
    request_timeout_s: float = option("timeouts.request", parse_time_limit)
    warn_after_s: float = option("sections.warn-after", parse_duration)
    resident_idle_s: float = option("sections.resident-idle", parse_duration)

    @property
    def any_producer_stream(self) -> bool:
        """True if blocks may have been written on streams other than CUDA's default streams."""
        return self.producer_streams == "any"

    def order(self, kind: Kind) -> tuple[str, ...]:
        """Return the transports for blocks of a kind ("numpy", "cupy"), best first."""
        if self.transports is not None:
            return self.transports
        transports = transport_classes().items()
        return tuple(name for name, transport in transports if transport.is_in_auto(kind))


#: Functions that return classes of transports by name, best first. `dask_p2p.transports` adds one:
#: it imports this module, and so cannot be imported here.
transport_finders: list[Callable[[], dict[str, Any]]] = []


@cache
def transport_classes() -> dict[str, Any]:
    """Return the classes of all transports by name, best first."""
    if not transport_finders:
        raise RuntimeError("expected dask_p2p.transports to be imported before options are read")
    return {name: cls for finder in transport_finders for name, cls in finder().items()}


def ensure_defaults() -> None:
    """Add the package's defaults to Dask's configuration, below the user's. Idempotent."""
    dask.config.update_defaults(_defaults())


@cache
def _defaults() -> dict[str, Any]:
    path = os.path.join(os.path.dirname(__file__), "p2p.yaml")
    with open(path) as file:
        # The loader in C, where PyYAML has it: each process that imports the package waits for it.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        defaults: dict[str, Any] = yaml.load(file, loader)
    return defaults


@cache
def _defaults_by_name() -> dict[str, Any]:
    return dict(_flatten_options(_defaults()))


def _flatten_options(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for part, value in tree.items():
        name = prefix + str(part).replace("_", "-")  # Dask treats both as equal
        if isinstance(value, Mapping):
            yield from _flatten_options(value, f"{name}.")
        else:
            yield name, value


#: Options of earlier versions, with their replacements.
_REMOVED = {
    **dict.fromkeys(
        (
            *(f"p2p.transports.{name}.part-bytes" for name in ("comm", "cma", "ucx", "pinned")),
            "p2p.transports.ucx.host-part-bytes",
        ),
        "p2p.transports.part-bytes sets the size of parts for all transports",
    ),
    **dict.fromkeys(
        ["p2p.transports.comm.parts-in-flight", "p2p.transports.ucx.parts-in-flight"],
        "readers request two parts ahead; for more bytes ahead, set p2p.transports.part-bytes",
    ),
    "p2p.transports.directory.wait": "readers wait 5 ms for a descriptor",
    "p2p.timeouts.backoff": "the first pause is 50 ms; p2p.attempts bounds the number of pauses",
    "p2p.checksum": "the network's protocols have checksums",
    "p2p.passes": "arrays are always redistributed in one pass; p2p.groups bounds their tasks",
    "p2p.permute-numpy": "CPUs permute NumPy blocks",
    "p2p.nvtx": "Prometheus and the page /p2p show times",
}


def checked_options() -> Options:
    """Read the options for a user's call, as `options`, and refuse unknown names.

    Workers accept unknown names, because other versions of the package may share a configuration.

    Raises `ConfigError` if a name is unknown or a value invalid.
    """
    user_values = dask.config.get("p2p", {})
    # Reading takes 0.1 ms, and each call of a user reads. Equal texts have equal values and types.
    return _checked_options(repr(user_values), tuple(transport_classes().items()))


@lru_cache(maxsize=1)
def _checked_options(_user_values: str, _transports: tuple[Any, ...]) -> Options:
    """Return the checked options. The arguments are all that they depend on."""
    defaults = _defaults_by_name()
    for name, value in _flatten_options({"p2p": dask.config.get("p2p", {})}):
        if name in _REMOVED:
            raise ConfigError(
                f"expected the name of an option, got {name}, which earlier versions had. Remove "
                f"it: {_REMOVED[name]}."
            )
        empty_section = value is None and any(key.startswith(f"{name}.") for key in defaults)
        if name not in defaults and not empty_section:
            in_section = (option for option in defaults if option.startswith(f"{name}."))
            nearest = next(in_section, None) or nearest_name(name, defaults)
            raise ConfigError(
                f"expected the name of an option, got {name}; the nearest is {nearest}. "
                f"Correct it in a Dask configuration file, in dask.config.set or in an environment "
                f"variable."
            )
    return options()


def options() -> Options:
    """Read the options that tasks carry; `ConfigError` if a value is invalid."""
    declared = [(field.name, field.metadata) for field in fields(Options)]
    return Options(**{name: _read(meta["option"], meta["parse"]) for name, meta in declared})


def installs_with_preload() -> bool:
    """Return true if `dask_p2p.preload` calls `dask_p2p.install`; `ConfigError` if invalid."""
    return _read("install", parse_bool)


def read_fuse_mode() -> str:
    """Return the option `p2p.fuse`: "off", "auto" or "on"; `ConfigError` if invalid."""
    return _read("fuse", _parse_fuse)


def _read(name: str, parse: Callable[[Any], _T]) -> _T:
    # If a user sets a whole section, Dask drops the section's other defaults.
    value = dask.config.get(f"p2p.{name}", _defaults_by_name()[f"p2p.{name}"])
    try:
        return parse(value)
    except (TypeError, ValueError, KeyError) as exc:
        raise ConfigError(
            f"option p2p.{name} is {value!r}: {exc}. Set it in a Dask configuration file, by "
            f"dask.config.set({{'p2p.{name}': ...}}) or by an environment variable."
        ) from exc
