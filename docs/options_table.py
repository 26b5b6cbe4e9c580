"""The table of options, from the schema and the defaults that the package ships."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

import yaml

__all__ = ["rows", "table"]


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield name, default, possible values and description of each option."""
    package = files("dask_p2p")
    schema = yaml.safe_load(
        (package / "p2p-schema.yaml").read_text("utf-8")
    )
    defaults = yaml.safe_load((package / "p2p.yaml").read_text("utf-8"))
    yield from _rows(
        "p2p", schema["properties"]["p2p"], defaults["p2p"]
    )


def _rows(
    name: str, schema: Mapping[str, Any], default: Any
) -> Iterator[tuple[str, ...]]:
    for part, inner in schema.get("properties", {}).items():
        yield from _rows(f"{name}.{part}", inner, default[part])
    if "properties" not in schema:
        text = " ".join(schema.get("description", "").split())
        yield (
            name,
            _plain(default),
            _unit(default) or _values(schema),
            text,
        )


def _unit(default: Any) -> str:
    """Return the kind of a text with a unit: size, duration, or an empty string."""
    if not str(default)[:1].isdigit() or not isinstance(default, str):
        return ""
    return "size" if default.endswith("B") else "duration"


def _values(schema: Mapping[str, Any]) -> str:
    if "oneOf" in schema:
        return " or ".join(map(_values, schema["oneOf"]))
    if "const" in schema:
        return f"`{_plain(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(
            f"`{_plain(value)}`" for value in schema["enum"]
        )
    if schema["type"] == "array":
        return f"list of {_values(schema['items'])}"
    least = (
        f", at least {schema['minimum']}" if "minimum" in schema else ""
    )
    kinds = {"boolean": "`true`, `false`", "string": "a size"}
    return kinds.get(schema["type"], "number") + least


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| option | meaning |", "|---|---|"]
    lines += [
        f"| `{name}` | Default `{default}`; values: {values}. {text} |"
        for name, default, values, text in rows()
    ]
    return "\n".join(lines) + "\n"
