"""All errors of this package, which are in `dask_p2p` as well: `P2PError` is their base.

Each message names the expected value, the actual value and the remedy. Classes that are not in
`__all__` are for code of this package and of transports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

# fmt: off
__all__ = [
    "BlockMismatchError", "ConfigError", "FileError", "InputError", "MemoryLimitError",
    "P2PError", "P2PWarning", "SectionError", "TransferError", "UnsupportedArrayError",
]
# fmt: on


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why two workers do not use a transport, and its remedy."""

    code: str  # identifier for programs
    text: str
    remedy: str = "Leave it as it is, or name another order in p2p.transports.order"

    def __str__(self) -> str:
        return self.text

    @property
    def full_text(self) -> str:
        return f"{self.text}. {self.remedy}"


class P2PError(Exception):
    """Base of all errors of this package."""


class InputError(P2PError, ValueError, TypeError):
    """The arguments of a call are invalid.

    It is both of Python's errors: Dask raises one or the other for the same arguments.
    """


class UnsupportedArrayError(InputError):
    """An array, or a graph of arrays, needs Dask's own functions.

    Copies of the array's bytes would not keep its values, or a graph cannot run as one gang.
    """


class BlockMismatchError(InputError):
    """A block's actual shape, dtype or type differs from its Dask array's declaration."""


#: The extent of a failure at a holder. "block": this block over any transport. "route": this block
#: over this transport, which is not tried again for the holder. "holder": all its blocks.
#: "region": this block over this transport. It does not count as a failure, and gives no warning.
Scope: TypeAlias = Literal["region", "block", "route", "holder"]


class TransferError(P2PError):
    """A region of a block could not be read. The message names the block and the worker."""

    def __init__(
        self,
        message: str,
        reason: str | None = None,  # without names, so that equal failures give one warning
        obstacle: Obstacle | None = None,  # the known reason why the transport does not work
        *,
        scope: Scope = "route",  # the other reads that fail for the same reason
        is_silence: bool = False,  # True if no answer came in time: no use to wait for other blocks
    ) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.obstacle = obstacle
        self.scope: Scope = scope
        self.is_silence = is_silence


# MemoryError comes first: its __new__ then makes the class, and pickle uses the same __new__ on
# another machine.
class MemoryLimitError(MemoryError, P2PError):
    """A block of a result needs more memory than its worker has or can spare.

    Attributes
    ----------
    needed_bytes : int
        Largest memory need of the task at any time.
    missing_bytes : int or None
        The part of the need that the worker can never provide. None if an allocation failed, since
        other tasks may hold the missing memory.
    """

    def __init__(
        self, message: str, needed_bytes: int = 0, missing_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.missing_bytes = missing_bytes


class DeviceLostError(P2PError):
    """The CUDA context of a process is lost, after a failed kernel or a fault of the hardware.

    The process cannot use its GPU any more; restart it.
    """


class ConfigError(P2PError, ValueError):
    """An option has an invalid value, or a process is not set up for this package.

    It lacks a package or a GPU, has another version, or cannot import the main program.
    """


class RegistrationError(ConfigError):
    """The scheduler or a worker cannot take part in transfers.

    The package is missing there, has another version, or is configured incorrectly.
    """


class SectionError(P2PError):
    """The ranks of a section made different calls, or too many of their attempts failed.

    Also raised if the ranks can never run at the same time, since workers lack resources or another
    section waits for them.
    """


class FileError(P2PError, OSError):
    """A file cannot be read or written as requested."""


# ImportError comes first: its constructor takes `name`.
class MissingPackageError(ImportError, ConfigError):
    """A package is not installed that only some functions need."""


class P2PWarning(UserWarning):
    """An operation works, but not as requested or not at the expected speed."""


#: Address of the package, as `project.urls` in pyproject.toml has it.
REPOSITORY = "https://github.com/dask-p2p/dask-p2p"


def install_command(extra: str) -> str:
    """Return the command that installs this package with an extra.

    >>> install_command("xarray")
    "pip install 'dask-p2p[xarray] @ git+https://github.com/dask-p2p/dask-p2p'"
    """
    return f"pip install 'dask-p2p[{extra}] @ git+{REPOSITORY}'"


@contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Return a context for the import of an optional package.

    If it is missing, raises `MissingPackageError` with the command that installs the extra.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != package:
            raise  # a dependency of the package is missing
        raise MissingPackageError(
            f"expected the package {package}, which is not installed. Run: "
            f"{install_command(extra)}",
            name=package,
        ) from None


_Error = TypeVar("_Error", bound=BaseException)


def without_frames(exc: _Error) -> _Error:
    """Return an exception that is to be kept, without the frames of its traceback and its causes.

    Frames refer to arrays, and some to the exception itself. Without this function all of them
    would stay in memory until Python collects garbage.
    """
    error: BaseException | None = exc
    while error is not None:
        error.__traceback__, cause = None, error.__cause__ or error.__context__
        error.__cause__ = error.__context__ = None
        error = cause
    return exc
