"""Arguments of `iterate`, in the form with names of fields and in the form without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask_p2p.errors import InputError
from dask_p2p.sections.iterate.binding import (
    UNNAMED,
    Binding,
    bound_by_name,
    bound_by_position,
)
from dask_p2p.sections.iterate.fields import (
    ConstantSpec,
    Field,
    FieldSpec,
    check_name,
    constants_by_position,
    field_spec,
    named_constants,
    named_fields,
)
from dask_p2p.sections.iterate.phase import Phase
from dask_p2p.types import DaskArray


@dataclass(frozen=True)
class Arguments:
    """Checked arguments of `iterate`."""

    phases: tuple[Phase, ...]
    fields: tuple[FieldSpec, ...]  # also constants with a halo, after the others
    constants: tuple[ConstantSpec, ...]
    arrays: list[DaskArray]  # levels of all fields, then the divided constants

    @property
    def results(self) -> list[FieldSpec]:
        """The fields that `iterate` returns."""
        return [spec for spec in self.fields if not spec.is_constant]

    def sorted(self, made: Sequence[DaskArray]) -> Any:
        """Return the results in the form of the fields."""
        rest, found = iter(made), {}
        for spec in self.results:
            levels = [next(rest) for _ in spec.depths]
            found[spec.name] = levels if spec.is_list else levels[0]
        if UNNAMED not in found:
            return found
        own = found[UNNAMED]
        return tuple(own) if isinstance(own, list) else own


def phases_of(func: Any) -> list[Any]:
    """Return the functions of a step, or pairs of a function and its fields."""
    return list(func) if isinstance(func, list) else [func]


def unnamed(
    func: Any,
    x: Any,
    constants: Any,
    depth: Any,
    boundary: Any,
    corners: bool,
    dtype: Any,
    kwargs: Mapping[str, Any],
    until: Any,
) -> Arguments:
    """Return the arguments for one array, or for its time levels."""
    spec, levels = field_spec(UNNAMED, Field(x, depth, boundary, dtype, corners))
    specs, arrays = constants_by_position(constants, levels[0])
    names = [constant.name for constant in specs]

    def bound(function: Callable[..., Any]) -> Binding:
        return bound_by_position(function, len(levels), names, kwargs)

    phases = _phases(func, [UNNAMED], bound, until)
    return Arguments(phases, (spec,), tuple(specs), [*levels, *arrays])


def named(
    func: Any,
    fields: Mapping[str, Any],
    constants: Any,
    depth: Any,
    boundary: Any,
    corners: bool,
    dtype: Any,
    kwargs: Mapping[str, Any],
    until: Any,
) -> Arguments:
    """Return the arguments for a mapping of fields."""
    if until is not None:
        raise InputError(
            "until: expected None for fields with names, whose function returns no numbers, got a "
            "function. Use dask_p2p.spmd to end a loop of coupled fields early."
        )
    specs, levels = named_fields(fields, depth, boundary, corners, dtype)
    plain, arrays, with_halo, halo_arrays = named_constants(constants, levels[0])
    names = [*(each.name for each in (*specs, *with_halo)), *(each.name for each in plain)]
    known = [*names, *kwargs]
    twice = sorted({name for name in known if known.count(name) > 1})
    if twice:
        raise InputError(
            f"expected different names of fields, constants and keywords, got {twice[0]!r} twice. "
            f"Rename one of them."
        )
    for name in kwargs:
        check_name(name, "a keyword")
    phases = _phases(
        func, [spec.name for spec in specs], lambda function: bound_by_name(function, known), None
    )
    used = set().union(*(phase.binding.names for phase in phases))
    if unused := [name for name in kwargs if name not in used]:
        raise InputError(
            f"expected keywords of the function, got {unused[0]!r}, which no function has. Remove "
            f"it, or add a parameter of that name."
        )
    return Arguments(phases, (*specs, *with_halo), tuple(plain), [*levels, *halo_arrays, *arrays])


def _phases(
    func: Any, names: Sequence[str], bound: Callable[[Any], Binding], until: Any
) -> tuple[Phase, ...]:
    """Return the phases of a step; only the last one returns the numbers of `until`."""
    given, found = phases_of(func), []
    if not given:
        raise InputError("expected at least one function, got an empty list.")
    for number, each in enumerate(given):
        function, changed = each if isinstance(each, tuple) else (each, names)
        own = (changed,) if isinstance(changed, str) else tuple(changed)
        if not own or not {*own} <= {*names}:
            raise InputError(
                f"expected a function, or a pair of a function and names out of {list(names)}, got "
                f"{each!r:.120}. Name the fields that the function fills: (func, ('u',))."
            )
        is_last = number == len(given) - 1
        found.append(Phase(function, bound(function), own, until is not None and is_last))
    return tuple(found)
