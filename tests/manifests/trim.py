"""Writes `kuberay.json`: of KubeRay's resource definitions what the manifests of docs/manifests need.

    python -m tests.manifests.trim FOLDER COMMIT

FOLDER is `helm-chart/kuberay-operator/crds` of a checkout of ray-project/kuberay (Apache-2.0) at COMMIT. The
parts that the manifests use are kept as they are there; of their siblings only the names are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

MANIFESTS = Path(__file__).parents[2] / "docs" / "manifests"
KEPT = Path(__file__).with_name("kuberay.json")
_RULES = ("type", "required", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern", "anyOf")


def documents() -> list[tuple[str, dict[str, Any]]]:
    """Each document of the manifests, with the name of its file."""
    return [
        (path.name, document)
        for path in sorted(MANIFESTS.glob("*.yml"))
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def trimmed(schema: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    """The part of a schema that these values need; unknown keys are errors where they are to Kubernetes."""
    kept = {rule: schema[rule] for rule in _RULES if rule in schema}
    mappings = [value for value in values if isinstance(value, dict)]
    if "properties" in schema:
        kept["properties"] = {
            name: trimmed(inner, found)
            if (found := [each[name] for each in mappings if name in each])
            else True
            for name, inner in schema["properties"].items()
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        inside = [item for each in mappings for item in each.values()]
        kept["additionalProperties"] = trimmed(schema["additionalProperties"], inside)
    if "items" in schema:
        items = [item for value in values if isinstance(value, list) for item in value]
        kept["items"] = trimmed(schema["items"], items)
    return kept


def main() -> None:
    """Write the file."""
    folder, commit = Path(sys.argv[1]), sys.argv[2]
    kinds: dict[str, Any] = {}
    for path in sorted(folder.glob("*.yaml")):
        definition = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
        own = [each for _, each in documents() if each["kind"] == definition["names"]["kind"]]
        version = next(each for each in definition["versions"] if each["name"] == "v1")
        if own:
            kinds[definition["names"]["kind"]] = trimmed(version["schema"]["openAPIV3Schema"], own)
    source = f"https://github.com/ray-project/kuberay at {commit}, Apache-2.0; trimmed by trim.py"
    KEPT.write_text(json.dumps({"source": source, "kinds": kinds}, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main()
