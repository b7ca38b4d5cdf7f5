"""Reading recipes from YAML: every fault at once, each with its file and line and the closest name."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from drafters.recipe import Recipe, RecipeError, drafter_names, find_drafter
from drafters.recipe_checks import unsound_settings

PathTo = tuple[str | int, ...]
SECTIONS = {entry.name: entry for entry in dataclasses.fields(Recipe)}


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-4 is a number, yes and on are words."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.[\d_]*|\.\d+|\d[\d_]*)(?:[eE][-+]?\d+)?$|[-+]?\.inf$|\.nan$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|false|True|False)$"), list("tfTF"))


@dataclass
class _Source:
    """Values of a recipe, where each of them stands, and the faults found so far."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[PathTo, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def fault(self, path: PathTo, message: str) -> None:
        place = next((self.places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.places), "recipe")
        name = ".".join(map(str, path))
        self.faults.append(f"{place}: {name}: {message}" if name else f"{place}: {message}")


def load_recipe(argv: Sequence[str]) -> Recipe:
    """The recipe a command line names.

    Args:
        argv: the YAML file, then overrides such as train.max_steps=5, their values read as YAML.

    Raises:
        RecipeError: lists every fault as file:line: path: what is wrong, what was expected.
    """
    if not argv:
        raise RecipeError("no recipe was named; expected: RECIPE.yaml [key=value ...]")
    source = _Source()
    _read_file(source, argv[0])
    for override in argv[1:]:
        _apply_override(source, override)
    recipe = _validate(source)
    if recipe is None or source.faults:
        raise RecipeError(f"{argv[0]} has {len(source.faults)} fault(s):\n  " + "\n  ".join(source.faults))
    return recipe


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes for editors; the drafter section is one of the heads' own, or has a dotted type and any fields."""
    schema = TypeAdapter(Recipe).json_schema()
    heads = [_head_schema(name) for name in drafter_names()]
    outside = {"type": "object", "properties": {"type": {"type": "string", "pattern": "\\."}}, "required": ["type"]}
    schema["properties"]["drafter"] = {"anyOf": [*heads, outside]}
    for part in (schema, *schema["$defs"].values(), *heads):
        part["additionalProperties"] = False
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _head_schema(name: str) -> dict[str, Any]:
    schema = TypeAdapter(find_drafter(name).Config).json_schema()
    schema["properties"]["type"] = {"const": name}
    schema["required"] = ["type", *schema.get("required", [])]
    return schema


def _read_file(source: _Source, name: str) -> None:
    try:
        text = Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {name}: {error}") from error
    source.places[()] = f"{name}:1"
    try:
        node = yaml.compose(text, _Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{name} is not YAML: {error}") from error
    value = _construct(source, node, (), name)
    if isinstance(value, dict):
        source.values = value
    else:
        source.fault((), f"expected sections ({', '.join(SECTIONS)}), got {value!r}")


def _construct(source: _Source, node: yaml.Node | None, path: PathTo, name: str) -> Any:
    """Plain values of a node; notes where each stands, and keys that stand twice."""
    if node is None:
        return None
    source.places[path] = f"{name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.SequenceNode):
        return [_construct(source, item, (*path, i), name) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        loader = _Loader("")
        try:
            return loader.construct_object(node)
        finally:
            loader.dispose()
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        value = _construct(source, value_node, (*path, key), name)
        source.places[(*path, key)] = f"{name}:{key_node.start_mark.line + 1}"
        if key in found:
            source.fault((*path, key), "stands twice")
        found[key] = value
    return found


def _apply_override(source: _Source, text: str) -> None:
    key, sign, value = text.partition("=")
    path: PathTo = tuple(key.split("."))
    for length in range(1, len(path)):
        source.places.setdefault(path[:length], "argv")
    source.places[path] = "argv"
    if not sign or len(path) < 2 or not all(path):
        source.fault(path, f"is not an override; expected section.field=value, got {text!r}")
        return
    try:
        parsed = _construct(source, yaml.compose(value, _Loader), path, "argv")
    except yaml.YAMLError as error:
        source.fault(path, f"{value!r} is not YAML: {error}")
        return
    source.places[path] = "argv"
    place: Any = source.values
    for part in path[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            source.fault(path, f"{part} holds no fields")
            return
    place[path[-1]] = parsed


def _validate(source: _Source) -> Recipe | None:
    parts = {}
    for name in source.values:
        if name not in SECTIONS:
            source.fault((name,), f"unknown section{_closest(name, SECTIONS)}")
    for name, kind in get_type_hints(Recipe).items():
        required = (
            SECTIONS[name].default is dataclasses.MISSING and SECTIONS[name].default_factory is dataclasses.MISSING
        )
        if name not in source.values:
            if required:
                source.fault((), f"section {name} is missing")
            continue
        if name == "drafter":
            kind = _drafter_config(source)
        if kind is not None:
            parts[name] = _section(source, name, kind)
    if source.faults:
        return None
    recipe = Recipe(**parts)
    for path, message in unsound_settings(recipe):
        source.fault(path, message)
    return recipe


def _drafter_config(source: _Source) -> type | None:
    section = source.values["drafter"]
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        source.fault(("drafter",), f"needs a field type: one of {', '.join(drafter_names())}, or a dotted module")
        return None
    try:
        return find_drafter(section["type"]).Config
    except ValueError as error:
        source.fault(("drafter", "type"), str(error))
        return None


def _section(source: _Source, name: str, kind: type) -> Any:
    value = source.values[name]
    _unknown_fields(source, (name,), value, kind)
    try:
        return TypeAdapter(kind).validate_json(json.dumps({} if value is None else value), strict=True)
    except ValidationError as error:
        for item in error.errors():
            location = tuple(part for part in item["loc"] if isinstance(part, int) or not part.endswith("]"))
            source.fault((name, *location), _explain(item))
    return None


def _unknown_fields(source: _Source, path: PathTo, value: Any, kind: Any) -> None:
    """Fields that a section, or a section in it, does not have; pydantic alone would pass them over."""
    if not isinstance(value, dict) or not dataclasses.is_dataclass(kind):
        return
    types = get_type_hints(kind)
    for name, part in value.items():
        if name in types:
            _unknown_fields(source, (*path, name), part, types[name])
        else:
            source.fault((*path, name), f"unknown field{_closest(name, types)}")


def _explain(item: Any) -> str:
    if item["type"] in ("missing", "missing_argument"):
        return "is missing"
    message = str(item["msg"]).removeprefix("Value error, ")
    return message if item["type"] == "value_error" else f"{message[0].lower()}{message[1:]}, got {item['input']!r}"


def _closest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
