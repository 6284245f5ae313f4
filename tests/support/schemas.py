"""The JSON Schemas of docs/reference/schemas: what files of the commands look like."""

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "reference" / "schemas"
SCHEMAS: dict[str, Any] = {
    path.name.partition(".")[0]: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*.schema.json"))
}


@cache
def _validator(name: str) -> Any:
    from jsonschema import Draft202012Validator  # slow to load
    from referencing import Registry, Resource

    Draft202012Validator.check_schema(SCHEMAS[name])
    registry: Registry[Any] = Registry().with_resources(
        (f"{name}.schema.json", Resource.from_contents(schema))
        for name, schema in SCHEMAS.items()
    )
    return Draft202012Validator(SCHEMAS[name], registry=registry)


def mistakes(name: str, data: Any) -> list[str]:
    """What a schema finds wrong with data, each with its place."""
    found = _validator(name).iter_errors(data)
    return [f"{error.json_path}: {error.message}" for error in found]
