"""Every error class of this package: all but `P2PWarning` are kinds of `P2PError`.

Each message says what was expected, what was found, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, TypeVar


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


#: What does not come from a holder, as far as an error tells.
Scope: TypeAlias = Literal["region", "block", "route", "holder"]


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

    Attributes
    ----------
    silent_s : float
        For how long the holder is known not to answer; 0 if it is not.
    """

    #: "block": this block, by whichever transport. "route": this block by this transport, which is
    #: not tried again for the holder. "holder": no block. "region": this block by this transport,
    #: which is no failure.
    scope: ClassVar[Scope] = "route"
    #: Whether nothing came in time, so that other blocks would be waited for in vain.
    is_silence: ClassVar[bool] = False

    silent_s = 0.0

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

    scope: ClassVar[Scope] = "block"


class UnreachableError(BlockUnavailableError):
    """A holder does not answer, or cannot be reached: so it is for all its blocks."""

    scope: ClassVar[Scope] = "holder"
    is_silence = True


class SilentError(TransferError):
    """Nothing came from a holder in time: so it is for all its blocks by the same transport."""

    is_silence = True


class UnsuitableError(TransferError):
    """Another transport brings this block better. That is no failure, and nobody is warned."""

    scope: ClassVar[Scope] = "region"


# MemoryError comes first: the class is then made by that one's __new__, by which pickle makes it
# again on another machine.
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


class NoDeviceError(P2PError):
    """A task is to compute on a GPU, and its worker has none."""


class ConfigError(P2PError, ValueError):
    """An option has a value that it cannot have."""


class RegistrationError(P2PError):
    """The scheduler or a worker cannot take part in transfers.

    The package is missing there, or is another version, or its configuration is wrong.
    """


class SectionError(P2PError):
    """The members of a gang made different calls, or too many of their attempts have failed.

    Or they never can run at the same time, since workers lack resources or another gang waits for
    them.
    """


class FileError(P2PError, OSError):
    """A file cannot be read or written as asked."""


class P2PWarning(UserWarning):
    """Something works, but not in the way or at the speed that was asked for."""


_Error = TypeVar("_Error", bound=BaseException)


def without_frames(exc: _Error) -> _Error:
    """Return an exception that is to be kept, without the frames of its traceback and its causes.

    Frames have arrays, and some have the exception: all would stay until Python collects garbage.
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
