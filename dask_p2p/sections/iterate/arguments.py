"""Arguments of `iterate`, in the form with names of fields and in the form without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from dask_p2p.backends import backend_for
from dask_p2p.backends.dlpack import wrap_in_library
from dask_p2p.errors import InputError
from dask_p2p.inputs import checked_count, checked_flag
from dask_p2p.ops.arguments import check_function, check_names
from dask_p2p.plans.halo import both_ends
from dask_p2p.sections.api.graph import check_computed
from dask_p2p.sections.context.grids import Points
from dask_p2p.sections.exchange.boundaries import functions_of
from dask_p2p.sections.gang.checkpoints import checked_period
from dask_p2p.sections.iterate.fields import (
    ConstantSpec,
    Field,
    check_fields,
    check_name,
    divide_constants,
    make_field_spec,
    name_constants,
)
from dask_p2p.sections.iterate.functions import (
    OUT,
    UNNAMED,
    Bind,
    BoundFunction,
    bind_by_name,
    bind_by_position,
)
from dask_p2p.sections.iterate.iteration import Arguments
from dask_p2p.sections.iterate.output.series import STEPS, checked_series
from dask_p2p.sections.iterate.output.stores import checked_stores
from dask_p2p.sections.iterate.step import Phase
from dask_p2p.types import DaskArray


def check_functions(
    func: Any,
    fields: Any,
    constants: Any,
    iterate: Callable[..., Any],
    options: Mapping[str, Any],  # arguments of `iterate`, by name
) -> None:
    """Raise `InputError` for functions that cannot be called, or have a keyword of `iterate`."""
    count = 0  # of the function's leading parameters, which receive fields and constants
    if not isinstance(fields, Mapping):
        count = sum(
            len(values) if isinstance(values, (list, tuple)) else 1
            for values in (fields, constants)
        )
    for phase in _phases_of(func):
        function = phase[0] if isinstance(phase, tuple) and phase else phase
        check_function(function, "fields with a halo", "iterate(func, fields, depth, steps)")
        check_names(function, count, iterate, options)


def checked_arguments(
    func: Any,
    field: Field,  # with the options of all fields
    constants: Any,
    kwargs: Mapping[str, Any],
    until: Any,
    record: Any,
    stores: tuple[Any, Any],  # save and checkpoint
    library: str | None,  # of the arrays that functions receive
) -> tuple[Arguments, list[Any]]:
    """Return the arguments, in either form, and the lazy arrays among them, or raise an error.

    These are the levels of all fields, and then constants: divided arrays, and `Whole` ones.
    """
    if until is not None and not callable(until):
        raise InputError(f"until: expected a function of numbers, got {until!r}.")
    if field.depth is None:
        raise InputError(
            "depth: expected the number of elements around a point that the function reads, got "
            "None. Give 0 if it reads none."
        )
    is_named = isinstance(field.value, Mapping)
    if is_named:
        constants = _named_constants(constants, kwargs, until, record)
        specs, levels, scalars = check_fields(field)
    else:
        _check_unnamed(record, stores)
        spec, levels = make_field_spec(UNNAMED, field)
        specs, scalars, constants = [spec], {}, name_constants(constants, levels[0])
    plain, arrays, with_halo, halo_arrays = divide_constants(constants, levels[0])
    arrays_of, numbers = [spec.name for spec in specs], [*scalars]
    read = [*(spec.name for spec in with_halo), *(spec.name for spec in plain)]
    all_names = [*arrays_of, *numbers, *read, *kwargs]
    twice = sorted({name for name in all_names if all_names.count(name) > 1})
    if twice:
        raise InputError(
            f"expected different names of fields, constants and keywords, got {twice[0]!r} twice. "
            f"Rename one of them."
        )

    def bind(function: Callable[..., Any]) -> BoundFunction:
        if is_named:
            binding = bind_by_name(function, all_names)
        else:
            binding = bind_by_position(function, specs[0].is_list, read, kwargs)
        return BoundFunction(wrap_in_library(function, library), binding)

    phases = _make_phases(func, arrays_of, bind, None if is_named else until, numbers)
    divided = [spec.name for spec in (*specs, *with_halo)]
    divided += [constant.name for constant in plain if constant.is_divided]
    names = [*arrays_of, *numbers]
    series = checked_series(record, names, bind, divided)
    frames, checkpoint = checked_stores(*stores, names, bind, levels[0].chunks)
    _check_library(library, phases, plain)
    arguments = Arguments(
        phases,
        fields=(*specs, *with_halo),
        scalars=scalars,
        constants=tuple(plain),
        series=series,
        frames=frames,
        checkpoint=checkpoint,
        names=tuple(field.value) if is_named else (),
    )
    if unused := [name for name in kwargs if name not in arguments.read_names]:
        raise InputError(
            f"expected keywords of the function, got {unused[0]!r}, which no function has. Remove "
            f"it, or add a parameter of that name."
        )
    check_computed(*(constant.value for constant in plain), *kwargs.values())
    return arguments, [*levels, *halo_arrays, *arrays]


def _named_constants(
    constants: Any, kwargs: Mapping[str, Any], until: Any, record: Any
) -> dict[str, Any]:
    """Return the constants of named fields; raise `InputError` for other forms."""
    if until is not None and not record:
        raise InputError(
            "until: expected records for it to read, as the fields have names, got none. Give "
            "record={'change': ...}, until=lambda last: last['change'] < 1e-8."
        )
    if not isinstance(constants, Mapping) and not (type(constants) is tuple and not constants):
        raise InputError(
            f"constants: expected a mapping of names, as the fields have, got "
            f"{type(constants).__name__}. Give {{'name': value}}."
        )
    named: dict[str, Any] = dict(constants)
    for name in named:
        check_name(name, "a constant")
    for name in kwargs:
        check_name(name, "a keyword")
    return named


def _check_unnamed(record: Any, stores: tuple[Any, Any]) -> None:
    """Raise `InputError` for options that need names of fields."""
    if stores != ((), None):
        raise no_names()
    if record:
        raise InputError(
            "record: expected fields by name, whose result is a dict with the series, got fields "
            "without names. Give the field by name, iterate(func, {'u': u}, ..., record=...)."
        )


def _check_library(
    library: str | None, phases: Sequence[Phase], constants: Sequence[ConstantSpec]
) -> None:
    """Raise `InputError` if a function fills arrays of JAX, or one of a library reads points."""
    if library == "jax" and any(phase.fills_out for phase in phases):
        raise InputError(
            f"as_library='jax': expected a function that returns its new blocks, as arrays of "
            f"JAX cannot be written, got one with a parameter {OUT}. Return the blocks."
        )
    if library is not None and any(isinstance(constant.value, Points) for constant in constants):
        raise InputError(
            f"as_library={library!r}: expected constants that are arrays or numbers, got "
            f"Points, which read NumPy and CuPy arrays. Leave out as_library, or the points."
        )


def _phases_of(func: Any) -> list[Any]:
    return list(func) if isinstance(func, list) else [func]


def checked_time(max_time: Any, arguments: Arguments) -> str | None:
    """Return the argument `max_time` of `iterate`."""
    if STEPS in arguments.names and (arguments.series or max_time is not None):
        raise InputError(
            f"expected other names of fields than {STEPS!r}, the number of steps in results with "
            f"record= or max_time=, got it. Rename the field."
        )
    if max_time is not None and not arguments.names:
        raise no_names()
    if max_time is None:
        return None
    with suppress(InputError):  # which names checkpoints
        if isinstance(max_time, str) and isinstance(checked_period(max_time), str):
            return max_time
    raise InputError(f"max_time: expected a time like '3 hours', got {max_time!r}. Give a text.")


def checked_capture(option: Any, library: str | None, arguments: Arguments) -> bool | str:
    """Return the argument `capture` of `iterate`, for functions of a library's arrays."""
    if isinstance(option, str) and option == "auto":
        return option
    capture = checked_flag("capture", option, "True, False or 'auto'")
    if capture and library is not None:
        raise InputError(
            f"capture: expected a function of CuPy arrays, got as_library={library!r}. Leave out "
            f"one of them."
        )
    if capture and arguments.scalars:
        raise InputError(
            f"capture: expected fields that are arrays, as all replayed steps have the same "
            f"numbers, got the number {next(iter(arguments.scalars))!r}. Leave out capture=True."
        )
    return capture


def check_streaming(
    on_gpu: Any,
    steps_per_visit: Any,
    slab_rows: Any,
    arguments: Arguments,
    first: DaskArray,  # the first field
    options: tuple[Any, Any, Any],  # capture, overlap and as_library of `iterate`
) -> None:
    """Raise `InputError` for arguments of `iterate` that streamed fields do not have."""
    counts = {"steps_per_visit": steps_per_visit, "slab_rows": slab_rows}
    sizes = {name: count for name, count in counts.items() if count is not None}
    if on_gpu is None and not sizes:
        return
    if not isinstance(on_gpu, str) or on_gpu != "stream":
        raise InputError(
            f"on_gpu: expected None, or 'stream' for fields in host memory that go through a GPU, "
            f"got {on_gpu!r}{''.join(f' and {name}' for name in sizes)}. Give on_gpu='stream', or "
            f"leave it out."
        )
    for name, count in sizes.items():
        checked_count(name, 1, **{name: count})
    phase, capture, overlap, library = arguments.phases[0], *options
    fields = arguments.fields
    refused = {
        "one function, got several phases": len(arguments.phases) > 1,
        "fields that are arrays, got a number": bool(arguments.scalars),
        "fields of one shape, got one that is longer": any(spec.extra for spec in fields),
        "a halo with corners, got corners=False": not all(spec.corners for spec in fields),
        "NumPy blocks, got CuPy blocks": backend_for(first._meta).on_device,
        "until= of records, got one of the function's numbers": phase.has_until,
        "a function without a parameter 'at'": phase.binding.reads_at,
        "halos of the newest time level, with a function as boundary=": any(
            any(map(any, chain(*spec.depths[1:]))) and functions_of(spec.boundary)
            for spec in fields
        ),
        "steps one by one, got capture=True": capture is True,
        "no overlap within slabs, got overlap=True": overlap is True,
        f"functions of NumPy and CuPy arrays, got as_library={library!r}": library is not None,
        "constants with one value for each element as fields, dask_p2p.Field(c, depth=0), by "
        "name, got an array": any(constant.is_divided for constant in arguments.constants),
    }
    for axis in range(first.ndim):
        reading = [spec for spec in fields if any(spec.widest[axis])]
        kinds = {"periodic" in both_ends(spec.boundary[axis]) for spec in reading}
        refused[f"fields that are all periodic along axis {axis}, or none, got both"] = (
            len(kinds) > 1
        )
    for text in (text for text, is_refused in refused.items() if is_refused):
        raise InputError(f"on_gpu='stream': expected {text}. Change it, or leave out on_gpu=.")


def no_names() -> InputError:
    """Return the error for options that need names of fields."""
    return InputError(
        "save, checkpoint, max_time: expected fields by name, got fields without names. Give the "
        "field by name, iterate(func, {'u': u}, ...)."
    )


def _make_phases(
    func: Any,
    names: Sequence[str],  # of the fields that are arrays
    bind: Bind,
    until: Any,
    numbers: Sequence[str],  # names of the fields that are numbers
) -> tuple[Phase, ...]:
    """Return the phases of a step; only the last one returns the numbers of `until`."""
    functions, phases = _phases_of(func), []
    if not functions:
        raise InputError("expected at least one function, got an empty list.")
    for number, entry in enumerate(functions):
        function, changed = entry if isinstance(entry, tuple) else (entry, [*names, *numbers])
        changed_names = (changed,) if isinstance(changed, str) else tuple(changed)
        if not changed_names or not {*changed_names} <= {*names, *numbers}:
            raise InputError(
                f"expected a function, or a pair of a function and names out of "
                f"{[*names, *numbers]}, got {entry!r:.120}. Name the fields that the function "
                f"fills: (func, ('u',))."
            )
        arrays = tuple(name for name in changed_names if name in names)
        scalars = tuple(name for name in changed_names if name in numbers)
        is_last = number == len(functions) - 1
        has_until = until is not None and is_last
        phases.append(Phase(*bind(function), arrays, has_until, scalars))
    return tuple(phases)
