"""Writes docs/api.md from the API's schema and docs/flags.md from the command line's parser.

python scripts/reference.py          # writes both
python scripts/reference.py --check  # fails if either is out of date
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import click

from chairlift.api.openapi import document
from chairlift.cli import COMMANDS

DOCS = Path(__file__).parent.parent / "docs"
NOTE = "<!-- Written by scripts/reference.py; change its sources and run it again. -->\n"
HEAD_OF_API = """# API reference

The OpenAI API, with vLLM's further fields. The machine-readable form of this page is `GET /openapi.json` of a server.
What clients need to know beside the fields stands in [clients.md](clients.md).

- Fields that the server does not know are ignored, named in the header `x-chairlift-warning` of the answer, and logged.
- Fields of OpenAI's API that ask for what chairlift does not have are refused by name, with status 400; with the value
  that asks for nothing, such as null, they are accepted.
- Errors have OpenAI's body: `{"error": {"message", "type", "param", "code"}}`. The message says what to change.
"""
HEAD_OF_FLAGS = """# Flags

Named as vLLM's are where vLLM has them; what has another name or meaning stands in [migrating.md](migrating.md).
"""


def api_page() -> str:
    """Every route and body as Markdown."""
    described = document()
    schemas = described["components"]["schemas"]
    lines = [NOTE, HEAD_OF_API, "## Routes\n", "| route | what it does | body | statuses |", "|---|---|---|---|"]
    used: list[str] = []
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            bodies = re.findall(r"schemas/(\w+)", json.dumps(operation.get("requestBody", {})))
            used += bodies
            links = ", ".join(f"[{name}](#{name.lower()})" for name in bodies)
            statuses = ", ".join(operation["responses"])
            lines.append(f"| `{method.upper()} {path}` | {operation['summary']} | {links} | {statuses} |")
    lines.append("\n## Bodies")
    for name in used:
        for inner in re.findall(r"schemas/(\w+)", json.dumps(schemas[name])):
            if inner not in used:
                used.append(inner)
        lines += _object(name, schemas[name])
    return "\n".join(lines) + "\n"


def _object(name: str, schema: dict[str, Any]) -> list[str]:
    lines = [f"\n### {name}\n", _prose(schema.get("description", "")), ""]
    if "properties" not in schema:
        return lines
    lines += ["| field | type | what it means |", "|---|---|---|"]
    required = schema.get("required", [])
    for field, described in schema["properties"].items():
        marks = "**" if field in required else ""
        text = _prose(described.get("description", ""))
        lines.append(f"| {marks}`{field}`{marks} | {_type(described)} | {text} |")
    return lines


def _prose(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


def _type(schema: dict[str, Any]) -> str:
    """What a value may be, in a few words. Null is left out: it stands for no value everywhere."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        kinds = [_type(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {_number(schema[key])}" for key, sign in limits.items() if key in schema]
    return " ".join([schema.get("type", "any"), *bounds])


def _number(value: float) -> str:
    """Large powers of two as such."""
    whole = int(value)
    if abs(whole) >= 2**31 and abs(whole).bit_count() == 1:
        return f"{'−' if whole < 0 else ''}2^{abs(whole).bit_length() - 1}"
    return f"{value:g}"


def flags_page() -> str:
    """Every flag of every command as Markdown."""
    lines = [NOTE, HEAD_OF_FLAGS]
    for name, summary in COMMANDS.items():
        command: click.Command = getattr(importlib.import_module(f"chairlift.cli.{name}"), name)
        context = click.Context(command)
        arguments = " ".join(p.make_metavar(context) for p in command.params if isinstance(p, click.Argument))
        lines += [f"\n## chairlift {name}\n", summary, "", f"`chairlift {name} {arguments}`".replace(" `", "`"), ""]
        options = [p for p in command.params if isinstance(p, click.Option)]
        if options:
            lines += ["| flag | what it does |", "|---|---|"]
            lines += [_flag(option, command) for option in options]
    return "\n".join(lines) + "\n"


def _flag(option: click.Option, command: click.Command) -> str:
    record = option.get_help_record(click.Context(command))
    if record is None:
        return ""
    flag, text = record
    return f"| `{_prose(flag)}` | {_prose(text)} |"


def main() -> int:
    """Writes the pages, or says which are out of date."""
    stale = []
    for name, page in (("api.md", api_page()), ("flags.md", flags_page())):
        path = DOCS / name
        if "--check" not in sys.argv:
            path.write_text(page, "utf-8")
        elif not path.is_file() or path.read_text("utf-8") != page:
            stale.append(name)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python scripts/reference.py", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
