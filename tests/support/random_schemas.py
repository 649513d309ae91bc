"""JSON schemas at random, of the kinds that an answer can be made to keep to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORDS = ("name", "größe", "a b", 'quo"te', "日本", "x", "items", "$id-like", "\\", "e\tf")


def random_schemas(count: int, seed: int = 0) -> list[Schema]:
    """So many schemas, each with an end to what can be written by it."""
    chance = random.Random(seed)
    return [_root(chance) for _ in range(count)]


def _root(chance: random.Random) -> Schema:
    if chance.random() < 0.1:
        node = {
            "type": "object",
            "properties": {"value": _any(chance, 1), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/node", "$defs": {"node": node}}
    return _any(chance, 3) | {"title": "T", "description": "any"}


def _any(chance: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_string, _integer, _number, _enum, _constant, _plain]
    if depth:
        kinds += [_object, _object, _object, _array, _either, _tuple]
    return chance.choice(kinds)(chance, depth)


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(WORDS, chance.randrange(4))
    properties = {name: _any(chance, depth - 1) for name in names}
    required = [name for name in names if chance.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(chance: random.Random, depth: int) -> Schema:
    least = chance.randrange(3)
    return {
        "type": "array",
        "items": _any(chance, depth - 1),
        "minItems": least,
        "maxItems": least + chance.randrange(3),
    }


def _tuple(chance: random.Random, depth: int) -> Schema:
    parts = [_any(chance, depth - 1) for _ in range(chance.randrange(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _either(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(chance, depth - 1) for _ in range(chance.randrange(1, 4))]}


def _string(chance: random.Random, depth: int) -> Schema:
    forms = ({"pattern": "^[a-c]{1,4}-[0-9]+x$", "maxLength": 12}, {"format": "date"}, {"format": "uuid"})
    if chance.random() < 0.4:
        return {"type": "string", **chance.choice(forms)}
    least = chance.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(9)}


def _integer(chance: random.Random, depth: int) -> Schema:
    least = chance.randrange(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randrange(500)}


def _number(chance: random.Random, depth: int) -> Schema:
    least = chance.randrange(-50, 50)
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + 1 + chance.randrange(20)}


def _enum(chance: random.Random, depth: int) -> Schema:
    values = [*WORDS, 5, -1.5, None, True, [1, "a"], {"k": []}]
    return {"enum": chance.sample(values, chance.randrange(1, 5))}


def _constant(chance: random.Random, depth: int) -> Schema:
    return {"const": chance.choice([*WORDS, 0, False, {"a": [None]}])}


def _plain(chance: random.Random, depth: int) -> Schema:
    return {"type": chance.choice(["boolean", "null", ["boolean", "null"]])}
