"""Arguments of the function of `iterate`: values by position, or by the names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any, NamedTuple

from dask.utils import has_keyword

from dask_p2p.errors import InputError
from dask_p2p.inputs import name_of_function

OUT, AT = "out", "at"  # parameters that are neither fields nor constants
#: Names of their values, by parameter: no user's name is like these.
VALUES = {OUT: "<out>", AT: "<at>"}
#: Name of the only field in the form of `iterate` that has no names.
UNNAMED = ""


class BoundValue(NamedTuple):
    """A value for one parameter."""

    name: str  # of the value
    level: int | None = None  # one of a field's time levels; None: all, or the only one


@dataclass(frozen=True)
class Binding:
    """The parameters of a function that get a value."""

    positional: tuple[BoundValue, ...]
    keywords: Mapping[str, str]  # by parameter: name of the value

    @property
    def names(self) -> set[str]:
        """Names of all values that the function reads or fills."""
        return {value.name for value in self.positional} | {*self.keywords.values()}

    @property
    def fills_out(self) -> bool:
        """True if the function fills a parameter named `out`."""
        return VALUES[OUT] in self.names

    @property
    def reads_at(self) -> bool:
        """True if the function has a parameter `at`."""
        return VALUES[AT] in self.names

    def bound(self, function: Callable[..., Any], values: Mapping[str, Any]) -> partial[Any]:
        """Return a function without parameters, which has the values of some names."""
        positional = (
            values[name] if level is None else values[name][level]
            for name, level in self.positional
        )
        keywords = {to: values[name] for to, name in self.keywords.items()}
        return partial(function, *positional, **keywords)


def bound_by_position(
    function: Callable[..., Any],
    levels: int,  # number of the field's time levels
    constants: Sequence[str],
    keywords: Collection[str],
) -> Binding:
    """Return the binding of a function of time levels, constants and keywords.

    Raises `InputError` for a keyword in the place of the parameter `out`.
    """
    fields = [BoundValue(UNNAMED, level) for level in range(levels)]
    found = {name: name for name in keywords}
    for parameter, name in VALUES.items():
        if has_keyword(function, parameter) and parameter not in found:
            found[parameter] = name
        elif has_keyword(function, parameter) and parameter == OUT:
            raise InputError(
                f"{OUT}: expected a parameter of the function, which iterate gives the memory to "
                f"fill, got a keyword. Leave it out."
            )
    return Binding((*fields, *map(BoundValue, constants)), found)


def bound_by_name(function: Callable[..., Any], names: Collection[str]) -> Binding:
    """Return the binding of a function whose parameters are names of values.

    Raises `InputError` if a parameter without a default value is no such name.
    """
    positional: list[BoundValue] = []
    keywords: dict[str, str] = {}
    bound = function.keywords if isinstance(function, partial) else {}
    is_leading = True  # whether all parameters so far are passed by position
    for parameter in _parameters(function):
        name, kind = parameter.name, parameter.kind
        if kind is Parameter.VAR_KEYWORD:
            used = {*keywords, *bound, *(value.name for value in positional)}
            keywords |= {name: name for name in names if name not in used}
        elif kind is Parameter.VAR_POSITIONAL:
            is_leading = False
        elif name in bound or name not in (*names, OUT, AT):
            is_leading = False
            if name not in bound and parameter.default is Parameter.empty:
                raise _unknown(function, name, names)
        elif kind is Parameter.KEYWORD_ONLY or not is_leading:
            if kind is Parameter.POSITIONAL_ONLY:
                raise _unknown(function, name, names)
            keywords[name] = VALUES.get(name, name)
        else:
            positional.append(BoundValue(VALUES.get(name, name)))
    return Binding(tuple(positional), keywords)


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    try:
        return [*signature(function).parameters.values()]
    except (TypeError, ValueError):
        raise InputError(
            f"expected a function whose parameters have the names of fields and constants, got "
            f"{name_of_function(function)}, whose parameters Python cannot list. Wrap it: "
            f"lambda u: func(u)."
        ) from None


def _unknown(function: Callable[..., Any], name: str, names: Collection[str]) -> InputError:
    return InputError(
        f"expected parameters with the names of fields, constants and keywords, {[*names]}, or "
        f"{OUT!r} or {AT!r}, got parameter {name!r} of {name_of_function(function)}. Rename it, or "
        f"give it a default value."
    )
