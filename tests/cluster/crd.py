"""Kubernetes' own check of a manifest, as strict as its server with strict validation: against the schema of a custom
resource, unknown keys refused."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator


@cache
def validator(file: Path) -> Draft7Validator:
    """Of the version that is stored, `v1`."""
    versions = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
    schema = next(version for version in versions if version["storage"])["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft7Validator(strict(schema))


def strict(schema: Any) -> Any:
    """JSON Schema out of Kubernetes' dialect of it."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def problems(file: Path, manifest: dict[str, Any]) -> list[str]:
    found = validator(file).iter_errors(manifest)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]
