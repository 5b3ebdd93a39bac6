"""Writes docs/api-reference.md, and the names that clients depend on, from the description: `python docs/reference.py`.

The names go to tests/contract/api-names.txt, a line for each operation and each component. `--check` writes nothing and
fails when a file would change. What breaks clients is refused: a name that is gone, of another type or newly required.
`--breaking` takes it; such a change brings a news fragment of that type.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api-reference.md"
NAMES = ROOT / "tests" / "contract" / "api-names.txt"
JSON = "application/json"
TITLES = {
    "sessions": "Operations on sessions",
    "runs": "Operations on runs, shells and processes",
    "files": "Operations on files",
    "workspaces": "Operations on workspaces",
    "events": "Operations on events",
    "node": "Operations on the node",
}
COMMON = ("INVALID_REQUEST", "UNAUTHORIZED", "FORBIDDEN", "TOO_LARGE", "QUOTA_EXCEEDED", "INTERNAL_ERROR", "CAPACITY")
"""Codes that are told once, for all operations."""

HEAD = """\
# API reference

What `GET /openapi.json` describes, made from it by docs/reference.py; [api.md](api.md) explains it, and
[websocket.md](websocket.md) the WebSockets. A field with a default may be left out, and so may one
marked `?`. In a request null is the same as an absent field, unless api.md says otherwise.

## Errors

Every error has the body [Error](#error). Any operation may answer with {common}; they are not repeated below.

| code | status | |
|---|---|---|
"""

Document = Mapping[str, Any]  # JSON values
Schema = Mapping[str, Any]  # JSON values


# Schemas in words -----------------------------------------------------------------------------------------------------


def kind_of(schema: Schema) -> str:
    """Return a schema's type without its bounds, in one word."""
    if "$ref" in schema:
        return _name(schema)
    if "anyOf" in schema:
        return "|".join(kind_of(each) for each in schema["anyOf"])
    if "oneOf" in schema:
        return "|".join(kind_of(each) for each in schema["oneOf"])
    if schema.get("not") == {}:
        return "refused"
    if schema.get("type") == "array":
        return f"[{kind_of(schema.get('items', {}))}]"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"{{{kind_of(schema['additionalProperties'])}}}"
    if "enum" in schema or "const" in schema:
        return "enum"
    kind = schema.get("type", "any")
    return kind if isinstance(kind, str) else "|".join(kind)


def words_of(schema: Schema) -> str:
    """Return a schema's type and bounds in words, as Markdown."""
    if "$ref" in schema:
        return f"[{_name(schema)}](#{_name(schema).lower()})"
    if "anyOf" in schema:
        parts = [words_of(each) for each in schema["anyOf"]]
        return (", or " if any("," in part for part in parts) else " or ").join(parts)
    if "oneOf" in schema:
        return "one of<br>" + "<br>".join(words_of(each) for each in schema["oneOf"])
    if schema.get("not") == {}:
        return "refused"
    if "const" in schema:
        return f"`{_spelled(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{_spelled(each)}`" for each in schema["enum"])
    kind = schema.get("type", "any")
    kind = kind if isinstance(kind, str) else " or ".join(kind)
    if kind == "array":
        return (
            f"array of {words_of(schema['items'])}{_count(schema)}" if "items" in schema else f"array{_count(schema)}"
        )
    if kind == "object":
        return _object(schema)
    return f"{kind}{_bounds(schema)}"


def _object(schema: Schema) -> str:
    if "properties" in schema:
        needed = schema.get("required", ())
        members = (
            f"`{name}`{'' if name in needed else '?'} {words_of(each)}" for name, each in schema["properties"].items()
        )
        return f"{{{', '.join(members)}}}"
    values = schema.get("additionalProperties")
    most = f", at most {schema['maxProperties']}" if "maxProperties" in schema else ""
    return f"object of {words_of(values)}{most}" if isinstance(values, dict) and values else f"object{most}"


def _bounds(schema: Schema) -> str:
    if "minimum" in schema:
        return f", {schema['minimum']} to {schema['maximum']}"
    if "pattern" in schema:
        return f" `{schema['pattern']}`"
    if "format" in schema or "contentEncoding" in schema:
        return f" ({schema.get('format') or schema['contentEncoding']})"
    if "maxLength" in schema:
        least = f"{schema['minLength']} to " if "minLength" in schema else "at most "
        return f", {least}{schema['maxLength']} characters"
    return ", not empty" if schema.get("minLength") else ""


def _count(schema: Schema) -> str:
    if "maxItems" not in schema:
        return ", each once" if schema.get("uniqueItems") else ""
    return f", {schema.get('minItems', 0)} to {schema['maxItems']}"


def _name(schema: Schema) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# The names ------------------------------------------------------------------------------------------------------------


def names_of(document: Document) -> dict[str, list[str]]:
    """Return the names that clients depend on: those of each operation and each component, required ones with a `*`."""
    found: dict[str, list[str]] = {}
    taken = _taken(document)
    for path, method, operation in operations(document):
        found[operation["operationId"]] = [f"{method.upper()} {path}".replace(" ", ":"), *_names_of(operation)]
    for name, schema in document["components"]["schemas"].items():
        place = "in" if name in taken else "out"
        found[f"{place} {name}"] = [*_fields_of(schema.get("properties", {}), schema.get("required", ()))]
    return found


def _names_of(operation: Mapping[str, Any]) -> Iterator[str]:
    for each in operation.get("parameters", ()):
        yield from _fields_of({f"{each['in']}.{each['name']}": each["schema"]}, ["*"] if each["required"] else [])
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"takes:{media}:{kind_of(content['schema'])}"
    for status, answer in operation["responses"].items():
        for media, content in answer.get("content", {"": {"schema": {}}} if "$ref" not in answer else {}).items():
            yield f"{status}:{media}:{kind_of(content['schema'])}"
    for medium, said in operation.get("x-messages", {}).items():
        for side in ("server", "client"):
            yield from (f"{medium}.{side}.{name}:{kind_of(each)}" for name, each in said.get(side, {}).items())
        yield from (f"protocol:{each}" for each in said.get("protocols", ()))


def _fields_of(properties: Mapping[str, Schema], required: Iterable[str]) -> Iterator[str]:
    for name, schema in properties.items():
        yield f"{name}:{kind_of(schema)}{'*' if name in required or '*' in required else ''}"
        plain = next((each for each in schema.get("anyOf", ()) if "enum" in each), schema)
        values = (
            plain.get("enum") or plain.get("items", {}).get("enum") or ([plain["const"]] if "const" in plain else [])
        )
        yield from (f"{name}={_spelled(value)}" for value in values)


def _taken(document: Document) -> set[str]:
    """Return the components that clients send."""
    found: set[str] = set()
    waiting = []
    for _, _, operation in operations(document):
        waiting.append(operation.get("requestBody", {}))
        waiting += (each.get("client", {}) for each in operation.get("x-messages", {}).values())
    while waiting:
        for name in _references(waiting.pop()) - found:
            found.add(name)
            waiting.append(document["components"]["schemas"][name])
    return found


def _references(part: object) -> set[str]:
    """Return the components that a part of the description refers to."""
    if isinstance(part, dict):
        own = {_name(part)} if "$ref" in part else set()
        return own.union(*map(_references, part.values()))
    return set().union(*map(_references, part)) if isinstance(part, list) else set()


def broken(before: Mapping[str, Iterable[str]], after: Mapping[str, Iterable[str]]) -> list[str]:
    """Return what clients of `before` would miss in `after`, or not know that it is required."""
    found = []
    for name, names in before.items():
        now = set(after.get(name, ()))
        found += [f"{name}: {each} is gone" for each in names if each not in now]
        is_answer = name.startswith("out ")
        found += [
            f"{name}: {each} is new"
            for each in now - set(names)
            if each.endswith("*") and not is_answer and name in after
        ]
    return sorted(found)


def read_names(text: str) -> dict[str, list[str]]:
    """Return the names in the file."""
    rows = (line.partition(": ") for line in text.splitlines() if line)
    return {name: names.split() for name, _, names in rows}


def spell_names(names: Mapping[str, Iterable[str]]) -> str:
    """Return the file."""
    return "".join(f"{name}: {' '.join(each.replace(' ', '_') for each in names[name])}\n" for name in sorted(names))


# The page -------------------------------------------------------------------------------------------------------------


def operations(document: Document) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield path, method and description of each operation."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def page_of(document: Document) -> str:
    """Return the page."""
    return "".join(f"{line}\n" for line in _page(document))


def _page(document: Document) -> Iterator[str]:
    common = ", ".join(f"`{code}`" for code in COMMON[:-1]) + f" and `{COMMON[-1]}`"
    yield HEAD.format(common=common).removesuffix("\n")
    for code, told in sorted(document["x-error-codes"].items(), key=lambda row: (row[1]["status"], row[0])):
        yield f"| `{code}` | {told['status']} | {_cell(told['meaning'])} |"
    inlined: set[str] = set()
    for tag, title in TITLES.items():
        yield f"\n## {title}"
        tagged = [(path, method, each) for path, method, each in operations(document) if each["tags"] == [tag]]
        for same in _twins(tagged):
            yield from _operation(same, document, inlined)
    yield "\n## Bodies and messages"
    schemas = document["components"]["schemas"]
    shared = _references(list(schemas.values()))
    for name, schema in schemas.items():
        if name not in inlined or name in shared:
            yield from _component(name, schema)


def _twins(tagged: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Iterator[list[tuple[str, str, Mapping[str, Any]]]]:
    """Yield operations with those that are the same for workspaces."""
    groups: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {}
    for path, method, operation in tagged:
        told = {name: operation.get(name) for name in ("summary", "requestBody", "x-messages")}
        told["query"] = [each for each in operation.get("parameters", ()) if each["in"] != "path"]
        groups.setdefault(f"{method} {path.rpartition('{id}')[2]} {told}", []).append((path, method, operation))
    yield from groups.values()


def _operation(same: list[tuple[str, str, Mapping[str, Any]]], document: Document, inlined: set[str]) -> Iterator[str]:
    operation = same[0][2]
    yield f"\n### {operation['summary'].removesuffix('.')}\n"
    for path, method, each in same:
        needs = each.get("x-needs")
        key = "no key" if needs is None else f"a key with {needs['access']} access"
        key += ", without a label" if needs is not None and needs["reach"] == "node" else ""
        yield f"- `{method.upper()} {path}`: `{each['operationId']}`; needs {key}"
    yield from _parameters(operation, is_twin=len(same) > 1)
    content = operation.get("requestBody", {}).get("content", {})
    for media, body in content.items():
        if media != JSON or "$ref" not in body["schema"]:  # JSON-RPC is described elsewhere
            yield from ("\nBody: " + ", ".join(f"`{each}`" for each in content) + ".",)
            break
        name = _name(body["schema"])
        inlined.add(name)
        schema = document["components"]["schemas"][name]
        yield f"\n{schema['description']}\n"
        yield from _table("field of the body", schema)
    yield from _answers(operation)
    codes = {code for _, _, each in same for code in _codes(each, document)} - set(COMMON)
    if codes:
        yield "\nErrors: " + ", ".join(f"`{code}`" for code in sorted(codes)) + "."
    for medium, said in operation.get("x-messages", {}).items():
        yield from _messages(medium, said)


def _parameters(operation: Mapping[str, Any], *, is_twin: bool) -> Iterator[str]:
    if parameters := operation.get("parameters"):
        yield "\n| parameter | in | type | default |\n|---|---|---|---|"
        for each in parameters:
            mark = "" if each["required"] or "default" in each["schema"] else "?"
            repeated = each["schema"].get("type") == "array"
            spelling = (", with commas between" if each.get("explode") is False else ", repeated") if repeated else ""
            words = f"{words_of(each['schema'])}{spelling}"
            words = "the session's or the workspace's" if is_twin and each["name"] == "id" else words
            yield f"| `{each['name']}`{mark} | {each['in']} | {_cell(words)} | {_default(each['schema'])} |"


def _answers(operation: Mapping[str, Any]) -> Iterator[str]:
    yield "\n| answer | body | headers |\n|---|---|---|"
    for status, answer in operation["responses"].items():
        if "$ref" in answer:
            continue
        bodies = [
            words_of(content["schema"]) if media == JSON else f"`{media}`"
            for media, content in answer.get("content", {}).items()
        ]
        headers = ", ".join(f"`{name}`" for name in answer.get("headers", {}))
        yield f"| {status} {answer['description']} | {_cell(' or '.join(bodies))} | {headers} |"


def _messages(medium: str, said: Mapping[str, Any]) -> Iterator[str]:
    name = "a WebSocket" if medium == "websocket" else f"`{medium}`"
    spoken = ", ".join(f"`{each}`" for each in said.get("protocols", ()))
    yield f"\nMessages over {name}{f' ({spoken})' if spoken else ''}:\n"
    yield "| message | of | body |\n|---|---|---|"
    for side in ("client", "server"):
        for message, schema in said.get(side, {}).items():
            yield f"| `{message}` | the {side} | {words_of(schema)} |"
    if "binary" in said:
        yield f"\nBinary messages: {said['binary']}."


def _component(name: str, schema: Schema) -> Iterator[str]:
    yield f"\n### {name}\n"
    if "$ref" in schema:
        yield f"{words_of({'$ref': schema['$ref']})} with\n"
    elif "description" in schema:
        yield f"{schema['description']}\n"
    yield from _table("field", schema)


def _table(title: str, schema: Schema) -> Iterator[str]:
    properties = schema["properties"]
    if not properties:
        yield "No fields."
        return
    has_default = any("default" in each for each in properties.values())
    yield f"| {title} | type |{' default |' if has_default else ''}\n|---|---|{'---|' if has_default else ''}"
    for name, each in properties.items():
        mark = "" if name in schema.get("required", ()) or "default" in each else "?"
        words = f"{words_of(each)}{' (an older name)' if each.get('deprecated') else ''}"
        yield f"| `{name}`{mark} | {_cell(words)} |{f' {_default(each)} |' if has_default else ''}"


def _default(schema: Schema) -> str:
    value = schema.get("default")
    if value is None:
        return ""
    return f"`{', '.join(value) if isinstance(value, list) else _spelled(value)}`"


def _codes(operation: Mapping[str, Any], document: Document) -> Iterator[str]:
    for answer in operation["responses"].values():
        if "$ref" in answer:
            found = document["components"]["responses"][_name(answer)]
            yield from found["content"][JSON]["schema"]["properties"]["error_code"]["enum"]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write both files, or check them; return the exit status."""
    from sandkasten.api.openapi import document
    from sandkasten.api.routes import TABLE

    described = document(TABLE.routes, "")
    page, names = page_of(described), spell_names(names_of(described))
    before = NAMES.read_text() if NAMES.exists() else ""
    if (faults := broken(read_names(before), read_names(names))) and "--breaking" not in arguments:
        print(
            "this breaks clients; `python docs/reference.py --breaking` takes it:", *faults, sep="\n", file=sys.stderr
        )
        return 1
    if "--check" in arguments:
        return int(page != PAGE.read_text() or names != before)
    PAGE.write_text(page)
    NAMES.write_text(names)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
