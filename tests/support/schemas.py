"""The JSON Schemas of docs/reference/schemas: what files of the commands look like."""

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

FOLDER = Path(__file__).parents[2] / "docs" / "reference" / "schemas"
SCHEMAS: dict[str, Any] = {
    path.name.partition(".")[0]: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*.schema.json"))
}
_REGISTRY: Registry[Any] = Registry().with_resources(
    (f"{name}.schema.json", Resource.from_contents(schema))
    for name, schema in SCHEMAS.items()
)


def mistakes(name: str, data: Any) -> list[str]:
    """What a schema finds wrong with data, each with its place."""
    validator = Draft202012Validator(SCHEMAS[name], registry=_REGISTRY)
    return [f"{e.json_path}: {e.message}" for e in validator.iter_errors(data)]
