"""Every error class of this package.

::

    P2PError
    ├── InputError (ValueError)         the request cannot be carried out as given
    │   ├── AxesError                   axes are no permutation of the array's axes
    │   ├── ChunksError (TypeError)     chunks are unknown, or do not fit the shape
    │   ├── UnsupportedArrayError       masked, sparse, object dtype on a GPU, ...
    │   └── VersionError                another version of the package has written it
    ├── BlockMismatchError              a block is not what the Dask array declares
    ├── TransferError                   a region could not be read
    │   ├── BlockUnavailableError       a holder no longer has, or never had, the block
    │   │   └── UnreachableError        a holder does not answer, or cannot be reached
    │   ├── SilentError                 nothing came from a holder in time
    │   └── UnsuitableError             another transport brings the block better
    ├── DeviceLostError                 a worker's GPU no longer works; the worker leaves
    ├── MemoryLimitError (MemoryError)  a block needs more memory than there is
    ├── ConfigError (ValueError)        an option has a value that it cannot have
    ├── RegistrationError               the scheduler or a worker cannot take part
    └── FileError (OSError)             a file cannot be read or written as asked

Each message says what was expected, what was found, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AxesError",
    "BlockMismatchError",
    "BlockUnavailableError",
    "ChunksError",
    "ConfigError",
    "DeviceLostError",
    "FileError",
    "InputError",
    "MemoryLimitError",
    "Obstacle",
    "P2PError",
    "P2PWarning",
    "RegistrationError",
    "SilentError",
    "TransferError",
    "UnreachableError",
    "UnsuitableError",
    "UnsupportedArrayError",
    "VersionError",
]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a transport is not used between two workers, and what to do about it."""

    code: str  # by which programs tell one from another
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
    """The request cannot be carried out as given."""


class AxesError(InputError):
    """The axes are no permutation of the array's axes."""


class ChunksError(InputError, TypeError):
    """The chunks are unknown, or do not fit the array's shape.

    A `TypeError` too: that is what Dask raises for names in the place of axes.
    """


class UnsupportedArrayError(InputError):
    """The array is of a kind whose values are not kept by copying bytes."""


class VersionError(InputError):
    """Another version of the package wrote what this one cannot read."""


class BlockMismatchError(P2PError):
    """A block's real shape, dtype or type differs from what its Dask array declares."""


class TransferError(P2PError):
    """A region of a block could not be read.

    Parameters
    ----------
    message : str
        Names the block and the worker.
    reason : str, optional
        The same without these names, so that equal failures of other blocks are warned of once.
    obstacle : Obstacle, optional
        What keeps the transport from working, if that is known.
    """

    def __init__(
        self, message: str, reason: str | None = None, obstacle: Obstacle | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.obstacle = obstacle


class BlockUnavailableError(TransferError):
    """A holder no longer has the block that it was asked for, or does not answer at all.

    Another transport would not help; another holder may.
    """


class UnreachableError(BlockUnavailableError):
    """A holder does not answer, or cannot be reached: so it is for all its blocks."""


class SilentError(TransferError):
    """Nothing came from a holder in time: so it is for all its blocks by the same transport."""


class UnsuitableError(TransferError):
    """Another transport brings this block better. That is no failure, and nobody is warned."""


# MemoryError comes first, or the class would be made by the other's __new__ and not by its own;
# whoever makes it again on another machine, by __new__ and its attributes, would be refused.
class MemoryLimitError(MemoryError, P2PError):
    """A block of a result needs more memory than its worker has, or than is free there.

    Parameters
    ----------
    message : str
        Says what needs how much, and what would make it fit.
    needed_bytes : int
        All that the task needs at the same time.
    missing_bytes : int, optional
        Of that, what there can never be. None if an allocation failed, since others may have
        taken what is missing.
    """

    def __init__(
        self, message: str, needed_bytes: int = 0, missing_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.missing_bytes = missing_bytes


class DeviceLostError(P2PError):
    """The CUDA context of a process is lost: by a kernel that failed, or by the hardware.

    Nothing works on its GPU until the process has ended.
    """


class ConfigError(P2PError, ValueError):
    """An option has a value that it cannot have."""


class RegistrationError(P2PError):
    """The scheduler or a worker cannot take part in transfers.

    The package is missing there, or is another version, or its configuration is wrong.
    """


class FileError(P2PError, OSError):
    """A file cannot be read or written as asked."""


class P2PWarning(UserWarning):
    """Something works, but not in the way or at the speed that was asked for."""
