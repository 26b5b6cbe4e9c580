"""Checks of users' functions, which would return wrong values without an error.

The first call of a function in `iterate` shows whether it leaves elements of `out` unset, would
lose fractions or imaginary parts, reads corners that are not exchanged, or writes into its fields.

Later calls are compared with calls of a copy for a part of the block: the values of a mean of the
block, of noise with one seed on all ranks, or of too far a neighbour depend on the number of ranks.
A copy is a pickle of the function and its arguments, made before their first call. Values that
differ by the function's state, or because it draws other random numbers in each call, show nothing.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import cloudpickle
import numpy as np
from dask.utils import funcname

from dask_p2p.errors import P2PWarning
from dask_p2p.geometry import Box, box_shape, cut_box
from dask_p2p.types import Array

if TYPE_CHECKING:
    from dask_p2p.sections.context.context import Context
    from dask_p2p.sections.exchange.ends import At
    from dask_p2p.sections.iterate.call import Call
    from dask_p2p.sections.iterate.functions.binding import Binding
    from dask_p2p.sections.iterate.iteration import Iteration
    from dask_p2p.sections.iterate.local_fields import LocalFields
    from dask_p2p.sections.iterate.output.series import SeriesSpec
    from dask_p2p.sections.iterate.phase import Phase, Returned

T = TypeVar("T")
#: Arguments of a function by name, for a box of the local block.
Values: TypeAlias = "Callable[[Binding, Box], Mapping[str, Any]]"

#: Operations that combine the numbers of all ranks.
OPS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}

#: Calls of a function that are compared, until one shows something: a field of zeros shows nothing.
_MOST_CALLS = 8
_ROUNDING = 2**10  # largest difference of rounding errors, in units of the last place
_MOST_NUMBERS = 64  # of an array, such as a histogram
_NUMBER_DIFFERENCE = 1e-4  # the same of numbers that are combined, relative to them
_NUMBER_NOISE = 32  # rounding errors of a sum, in units of the last place of each element
_MOST_COPIED_BYTES = 2**26  # larger arrays of a function are lent to its copies, read-only
#: Modules that are not the user's, wherever they lie.
_LIBRARIES = {*sys.stdlib_module_names, "dask_p2p", "dask", "distributed", "__main__"}
_STEP = (
    "Means, norms and sums over its argument are those of one local block: compute them of the "
    "whole array, by record= and at.last, or by spmd and ctx.allreduce. A function that reads more "
    "neighbours than depth= gives it returns such values, too. So does one that draws random "
    "numbers, the same on each rank: seed them by np.random.default_rng((seed, at.step, at.rank))."
)
_NUMBERS = (
    "Means, extremes and norms of local blocks do not add up, and a halo has elements of "
    "neighbours, which count twice. Return sums without the halo, (u[1:-1]**2).sum(), or record "
    "other numbers by another op, Record(function, op='max')."
)
_UNTIL = "until"
_REGISTRY = Lock()  # cloudpickle has one registry in a process


class Watch(NamedTuple):
    """Notes what a function reads of its position, or moves the position."""

    reads: list[str] | None = None  # gets "rank", and "at" for any other position
    shift: Sequence[int] = ()  # by axis

    def __call__(self, at: At) -> At:
        """Return the position for a copy of a function."""
        return at.watched(self.reads, self.shift)


#: Computes arrays for a box by copies of values, at a position that a watch returns.
Compute: TypeAlias = Callable[[tuple[Any, ...], Box, Watch], Any]


class Copies:
    """Returns copies of some values in their present state; None if they have no pickle.

    Functions and classes of the user's modules are copied with their global variables.
    """

    def __init__(self, *values: Any) -> None:
        self._buffers: list[Any] = []
        self._pickled: bytes | None = None
        buffers: list[pickle.PickleBuffer] = []
        with suppress(Exception), _modules_by_value():
            pickled = cloudpickle.dumps(values, buffer_callback=buffers.append)
            self._buffers = [_lent(buffer.raw()) for buffer in buffers]
            self._pickled = pickled

    def __bool__(self) -> bool:
        return self._pickled is not None

    def __call__(self) -> tuple[Any, ...]:
        """Return the next copies."""
        buffers = (b if isinstance(b, memoryview) else bytearray(b) for b in self._buffers)
        copies: tuple[Any, ...] = _Unpickler(
            io.BytesIO(self._pickled or b""), buffers=buffers
        ).load()
        return copies


def _lent(memory: memoryview) -> Any:
    return bytes(memory) if memory.nbytes <= _MOST_COPIED_BYTES else memory.toreadonly()


class _Unpickler(pickle.Unpickler):
    """Makes new classes: cloudpickle would change those of this process."""

    def find_class(self, module: str, name: str) -> Any:
        value = super().find_class(module, name)
        if module.startswith("cloudpickle") and name.startswith("_make_skeleton_"):
            return lambda *args: value(*args[:-2], None, args[-1])  # without the id of the class
        return value


@contextmanager
def _modules_by_value() -> Iterator[None]:
    """Pickle the functions and classes of the user's modules by value."""
    with _REGISTRY:
        registered = cloudpickle.list_registry_pickle_by_value()
        modules = [
            m for name, m in [*sys.modules.items()] if name not in registered and _is_of_user(m)
        ]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def _is_of_user(module: Any) -> bool:
    """Return whether a module is neither installed nor part of a module."""
    name = getattr(module, "__name__", "")
    if "." in name or name in _LIBRARIES or sys.modules.get(name) is not module:
        return False
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    return bool(path) and not {"site-packages", "dist-packages"} & {*PurePath(path).parts}


def is_close(module: Any, part: Array, whole: Array) -> bool:
    """Return whether arrays of a module differ by rounding errors only."""
    if whole.dtype.kind not in "fc":
        return bool((whole == part).all())
    tolerance = _ROUNDING * float(np.finfo(whole.dtype).eps)
    largest = float(module.nan_to_num(abs(whole)).max())
    limits = tolerance, tolerance * largest  # relative, absolute
    return bool(module.allclose(part, whole, *limits, equal_nan=True))


class Comparison:
    """Compares the first calls of a function for a block with those of copies for a part of it.

    Parameters
    ----------
    name
        Name of the function in warnings.
    block, remedy
        Name of the block, and sentences with another way, for warnings.
    whole
        Bounds of the block.
    is_divided
        By axis, whether its elements are divided between ranks.
    values
        The function and its arguments that a call may change.
    module
        Module of the arrays.
    """

    def __init__(
        self,
        name: str,
        block: str,
        remedy: str,
        whole: Box,
        is_divided: Sequence[bool],
        values: Sequence[Any],
        module: Any = np,
    ) -> None:
        self._name, self._block, self._remedy, self._module = name, block, remedy, module
        lengths = zip(box_shape(whole), is_divided, strict=True)
        #: By axis: length of the block if it is divided, else 0.
        self._lengths = [n if is_cut and n > 1 else 0 for n, is_cut in lengths]
        pairs = zip(whole, self._lengths, strict=True)
        self._whole, self._part = whole, tuple(_part(along, n) for along, n in pairs)
        self.copies = Copies(*values if any(self._lengths) else ())
        self._left = _MOST_CALLS if any(self._lengths) and self.copies else 0

    def __bool__(self) -> bool:
        """Return whether the next call is compared."""
        return self._left > 0

    def __call__(
        self,
        compute: Compute,
        call: Callable[[], T],
        arrays: Callable[[T], Any],
        read: Sequence[Array] | None = None,
    ) -> T:
        """Return the value of a call for the whole block; warn if it depends on the block.

        Parameters
        ----------
        compute
            Returns the arrays that copies of the values compute for a box.
        call
            Calls the function for the whole block.
        arrays
            Returns the arrays for the whole block, from the value of `call`.
        read
            Arrays that the function reads, by default its values. If they are uniform, the next
            call is compared, too.
        """
        part = None
        with suppress(Exception):  # of a function for blocks of this size alone
            part = self._of_parts(compute)  # before the call: files that both write have its values
        value = call()
        left, self._left = self._left - 1, 0
        if part is not None:
            with suppress(Exception):
                if self._depends(compute, part, self._cut(arrays(value))):
                    _warn(self._name, self._block, self._remedy)
                elif not self._shows(arrays(value) if read is None else read):
                    self._left = left
        return value

    def _shows(self, arrays: Sequence[Array]) -> bool:
        """Return whether a mean differs from some elements."""
        return not all(a.size == 0 or bool((a == a[(0,) * a.ndim]).all()) for a in arrays)

    def _depends(self, compute: Compute, part: Sequence[Array], cut: Sequence[Array]) -> bool:
        """Return whether values depend on the division of the array into blocks."""
        if self._is_same(part, cut):
            return False
        reads: list[str] = []
        again = self._of_parts(compute, reads)
        cut = self._of_whole(compute)
        if "rank" in reads or not self._is_same(again, part) or self._is_same(part, cut):
            return False  # random numbers of each rank, or of each call; a state
        if "at" not in reads:
            return True
        # Random numbers by the position differ elsewhere; those of a mean differ alike.
        away = self._of_parts(compute, reads, self._lengths), self._of_whole(compute, self._lengths)
        changes = (_minus(*pair) for pair in zip(*away, strict=True))
        of_rows = zip(cut, part, changes, strict=True)
        return self._is_same(cut, [c + change - _minus(p, c) for c, p, change in of_rows])

    def _of_parts(
        self, compute: Compute, reads: list[str] | None = None, shift: Sequence[int] = ()
    ) -> list[Array]:
        return [*compute(self.copies(), self._part, Watch(reads, shift))]

    def _of_whole(self, compute: Compute, shift: Sequence[int] = ()) -> list[Array]:
        return self._cut(compute(self.copies(), self._whole, Watch(None, shift)))

    def _cut(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the part of arrays for the whole block."""
        lows = zip(self._part, self._whole, strict=True)
        slices = tuple(slice(a - low, b - low) for (a, b), (low, _) in lows)
        return [array[slices] for array in arrays]

    def _is_same(self, parts: Sequence[Array], cut: Sequence[Array]) -> bool:
        return all(is_close(self._module, *pair) for pair in zip(parts, cut, strict=True))


class NumberComparison(Comparison):
    """The same for numbers: those of two parts of a block combine to that of the block.

    Parameters
    ----------
    combine
        Combines the numbers of ranks.
    arrays
        Returns the arrays that the function reads.
    """

    def __init__(
        self, *given: Any, combine: Callable[[Any, Any], Any], arrays: Callable[[], Iterable[Array]]
    ) -> None:
        super().__init__(*given)
        self._combine, self._read = combine, arrays

    def _of_parts(
        self, compute: Compute, reads: list[str] | None = None, shift: Sequence[int] = ()
    ) -> list[Array]:
        axes = [axis for axis, n in enumerate(self._lengths) if n]
        peak = self._peak()
        cuts = (cut_box(self._whole, axis, peak[axis]) for axis in axes)
        watch = Watch(reads, shift)
        return [self._combine(*(compute(self.copies(), box, watch) for box in cut)) for cut in cuts]

    def _peak(self) -> list[int]:
        """Return a place to cut: at the largest element, for a field may be zero elsewhere."""
        for array in self._read():
            if array.ndim == len(self._lengths) and array.size and array.dtype.kind in "biufc":
                along = np.unravel_index(np.argmax(abs(array)), array.shape)
                pairs = zip(along, array.shape, self._lengths, strict=True)
                places = [int(at) * n // size for at, size, n in pairs]
                return [at or 3 * n // 7 or 1 for at, n in zip(places, self._lengths, strict=True)]
        return [3 * n // 7 or 1 for n in self._lengths]

    def _shows(self, arrays: Sequence[Array]) -> bool:
        return bool(np.any(arrays))

    def _cut(self, arrays: Sequence[Array]) -> list[Array]:
        return [np.asarray(arrays)] * sum(map(bool, self._lengths))

    def _is_same(self, parts: Sequence[Array], cut: Sequence[Array]) -> bool:
        read = [array for array in self._read() if array.size and array.dtype.kind in "iufc"]
        epsilon = max((np.finfo(a.dtype).eps for a in read if a.dtype.kind in "fc"), default=1e-16)
        largest = max((float(abs(array).max()) for array in read), default=0.0)
        noise = _NUMBER_NOISE * epsilon * np.prod(box_shape(self._whole)) * largest
        noise *= self._combine is np.add
        differences = abs(np.subtract(parts, cut, dtype=complex))
        limits = np.maximum(_NUMBER_DIFFERENCE * np.maximum(np.abs(parts), np.abs(cut)), noise)
        return bool((differences <= limits).all() or not np.isfinite(differences).all())


def _part(along: tuple[int, int], length: int) -> tuple[int, int]:
    """Return a part with two cuts; it lies off the centre, where waves have other means."""
    start, stop = along
    if not length:
        return start, stop
    start += max(1, length // 7)
    return start, start + max(1, length * 10 // 21)


def _minus(a: Array, b: Array) -> Array:
    return a.astype(np.result_type(a.dtype, np.float64)) - b


def _warn(name: str, block: str, remedy: str) -> None:
    """Warn of a function of blocks, in the client and in this worker."""
    from distributed import warn

    warn(
        f"{name} returns other values for halves of {block} than for the whole, so its result "
        f"depends on the number of ranks. {remedy}",
        P2PWarning,
    )


def _name(function: Any) -> str:
    """Return the name of a function; that of its class for other objects, without an address."""
    name = funcname(function)
    return type(function).__name__ if name.startswith("<") and " at 0x" in name else name


def watched(values: Mapping[str, Any], watch: Watch | None) -> dict[str, Any]:
    """Return the arguments of a copy: a watch notes what it reads of its position."""
    if watch is None:
        return {**values}
    positions = {name for name, value in values.items() if hasattr(value, "watched")}
    return {name: watch(own) if name in positions else own for name, own in values.items()}


class Checks:
    """The checks of one rank of `iterate`.

    Attributes
    ----------
    are_due : bool
        Whether the next call of a function in a step is compared.
    """

    def __init__(self, of: Iteration, ctx: Context, local: LocalFields) -> None:
        self._device, self._local = ctx.device, local
        self._whole = next(iter(local.fields.values())).layout.whole
        is_divided = [n > 1 and not of.is_staggered for n in ctx.grid]
        block = "a local block"

        def given(name: str, remedy: str, function: Any) -> tuple[Any, ...]:
            values = function, local.keywords
            return name, block, remedy, self._whole, is_divided, values, ctx.device.module

        self._of_phases = {
            id(phase): Comparison(
                *given(f"iterate: {_name(phase.function)}", _STEP, phase.function)
            )
            for phase in of.phases
        }
        self._of_numbers: dict[Any, NumberComparison] = {}
        combined: dict[Any, Any] = {
            spec.name: (f"record[{spec.name!r}]", spec.record.op, spec.record.function)
            for spec in of.series
            if not (spec.is_same or spec.binding.reads_at)
        }
        if of.until is not None and not of.series:
            combined[_UNTIL] = _UNTIL, "sum", of.phases[-1].function
        for key, (name, op, function) in combined.items() if ctx.device.has_read_only else ():
            arguments = given(name, _NUMBERS, function)
            self._of_numbers[key] = NumberComparison(
                *arguments, combine=OPS[op], arrays=lambda: self._read
            )
        self.are_due = any(map(bool, self._of_phases.values()))

    @property
    def _read(self) -> list[Array]:
        return [field.newest.inner for field in self._local.fields.values()]

    def step(self, call: Call, values: Values, apply: Callable[[], Returned]) -> Returned:
        """Make a call of a step for the whole local block, and compare it."""
        comparison = self._of_phases[id(call.phase)]
        fields = self._local.fields

        def compute(copies: tuple[Any, ...], box: Box, watch: Watch) -> list[Array]:
            blocks, _ = self._computed(call.phase, call.changed, values, copies, box, watch)
            return [*blocks.values()]

        def computed(_: Returned) -> list[Array]:
            return [fields[name].spare.inner for name in call.changed]

        returned = comparison(compute, apply, computed, self._read) if comparison else apply()
        self.are_due = any(map(bool, self._of_phases.values()))
        return returned

    def _computed(
        self,
        phase: Phase,
        changed: Sequence[str],  # names of fields
        values: Values,
        copies: tuple[Any, ...],
        box: Box,
        watch: Watch,
    ) -> tuple[dict[str, Array], Returned]:
        """Call a copy for a box; return new blocks in memory of their own, and its other values."""
        function, keywords = copies
        parts = {name: self._local.fields[name].parts(box)[0] for name in changed}
        outs = {
            name: self._device.empty(part.data[part.inner].shape, part.data.dtype)
            for name, part in parts.items()
        }
        arguments = watched({**values(phase.binding, box), **keywords}, watch)
        return outs, replace(phase, function=function).fill(self._device, arguments, outs, parts)

    @property
    def compares_until(self) -> bool:
        """True before the first comparison of numbers for `until`. The same on all ranks."""
        return _UNTIL in self._of_numbers

    def until(self, phase: Phase, changed: Sequence[str], values: Values) -> None:
        """Compare the numbers that a function returns, before `until` gets the first ones."""
        comparison = self._of_numbers.pop(_UNTIL, None)

        def compute(copies: tuple[Any, ...], box: Box, watch: Watch) -> Array:
            _, returned = self._computed(phase, changed, values, copies, box, watch)
            return np.asarray(returned.numbers)

        if comparison:
            whole = partial(compute, comparison.copies(), self._whole, Watch())
            comparison(compute, whole, np.ravel)

    def record(self, spec: SeriesSpec, values: Values, number: Callable[..., Array]) -> Array:
        """Return the value of a record; `number` calls its function with arguments by name."""

        def call() -> Array:
            return number(spec.record.function, values(spec.binding, self._whole))

        def compute(copies: tuple[Any, ...], box: Box, watch: Watch) -> Array:
            function, keywords = copies
            arguments = {**values(spec.binding, box), **keywords}
            return np.ravel(number(function, watched(arguments, watch)))[:_MOST_NUMBERS]

        comparison = self._of_numbers.get(spec.name)
        return (
            comparison(compute, call, lambda value: np.ravel(value)[:_MOST_NUMBERS])
            if comparison
            else call()
        )
