"""All error classes of this package: subclasses of `P2PError`, and `P2PWarning`.

Each message names the expected value, the actual value and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, TypeVar


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
        """The text with the remedy."""
        return f"{self.text}. {self.remedy}"


class P2PError(Exception):
    """Base of all errors of this package."""


class InputError(P2PError, ValueError):
    """The arguments of a call are invalid."""


class AxesError(InputError):
    """The axes are not a permutation of the array's axes."""


class ChunksError(InputError, TypeError):
    """The chunks are unknown, or do not fit the array's shape.

    It is a `TypeError` as well, since Dask raises one for names instead of axes.
    """


class UnsupportedArrayError(InputError):
    """Copies of the array's bytes would not keep its values."""


class FuseError(InputError):
    """A graph cannot run as one gang."""


class VersionError(InputError):
    """Another version of the package wrote a value that this one cannot read."""


class BlockMismatchError(P2PError):
    """A block's actual shape, dtype or type differs from its Dask array's declaration."""


#: The extent of a failure at a holder.
Scope: TypeAlias = Literal["region", "block", "route", "holder"]


class TransferError(P2PError):
    """A region of a block could not be read.

    Parameters
    ----------
    message : str
        Names the block and the worker.
    reason : str, optional
        The message without these names, so that equal failures of several blocks give one warning.
    obstacle : Obstacle, optional
        The known reason why the transport does not work.
    """

    #: "block": this block over any transport. "route": this block over this transport, which is not
    #: tried again for the holder. "holder": all blocks of the holder. "region": this block over
    #: this transport, which does not count as a failure.
    scope: ClassVar[Scope] = "route"
    #: True if no answer came in time, so that waiting for other blocks would be useless.
    is_silence: ClassVar[bool] = False

    def __init__(
        self, message: str, reason: str | None = None, obstacle: Obstacle | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.obstacle = obstacle


class BlockUnavailableError(TransferError):
    """A holder no longer has the requested block, or does not answer at all.

    Another transport would not help, but another holder may.
    """

    scope: ClassVar[Scope] = "block"


class UnreachableError(BlockUnavailableError):
    """A holder does not answer or cannot be reached; applies to all its blocks."""

    scope: ClassVar[Scope] = "holder"
    is_silence = True


class SilentError(TransferError):
    """A holder did not answer in time; applies to all its blocks over this transport."""

    is_silence = True


class UnsuitableError(TransferError):
    """Another transport suits this block better; neither a failure nor a reason to warn."""

    scope: ClassVar[Scope] = "region"


# MemoryError comes first: its __new__ then makes the class, and pickle uses the same __new__ on
# another machine.
class MemoryLimitError(MemoryError, P2PError):
    """A block of a result needs more memory than its worker has or can spare.

    Parameters
    ----------
    message : str
        Names the block, its memory need and the remedy.
    needed_bytes : int
        Largest memory need of the task at any time.
    missing_bytes : int, optional
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


class NoDeviceError(P2PError):
    """A task needs a GPU, and its worker has none."""


class ConfigError(P2PError, ValueError):
    """An option has an invalid value."""


class RegistrationError(P2PError):
    """The scheduler or a worker cannot take part in transfers.

    The package is missing there, has another version, or is configured incorrectly.
    """


class StartError(P2PError, RuntimeError):
    """The workers of a cluster could not start, since they could not import the main program."""


class SectionError(P2PError):
    """The ranks of a section made different calls, or too many of their attempts failed.

    Also raised if the ranks can never run at the same time, since workers lack resources or another
    section waits for them.
    """


class FileError(P2PError, OSError):
    """A file cannot be read or written as requested."""


class MissingPackageError(P2PError, ImportError):
    """A package is not installed that only some functions need."""


class P2PWarning(UserWarning):
    """An operation works, but not as requested or not at the expected speed."""


_REPOSITORY = "git+https://github.com/dask-p2p/dask-p2p"


def install_command(extra: str) -> str:
    """Return the command that installs this package with an extra.

    >>> install_command("xarray")
    "pip install 'dask-p2p[xarray] @ git+https://github.com/dask-p2p/dask-p2p'"
    """
    return f"pip install 'dask-p2p[{extra}] @ {_REPOSITORY}'"


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
    each: BaseException | None = exc
    while each is not None:
        each.__traceback__, cause = None, each.__cause__ or each.__context__
        each.__cause__ = each.__context__ = None
        each = cause
    return exc


__all__ = [
    name for name, of in globals().items() if isinstance(of, type) and of.__module__ == __name__
]
