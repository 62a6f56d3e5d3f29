"""Changes to a recipe from the command line: `a.b=c` sets (as does Hydra's `+a.b=c`), `~a.b` deletes."""

import yaml

from corral.recipe.document import NULLS, OVERRIDE, Document, Where, compose
from corral.recipe.errors import RecipeError
from corral.recipe.keys import PLACEMENT, KeyPath, dotted, expand, find_key


def apply_override(document: Document, text: str) -> None:
    where = Where(OVERRIDE, f"override {text}")
    if text.startswith("~"):
        path = expand((), text[1:].strip())
        if not document.remove(path):
            document.report(where, f"`{dotted(path)}` is not set in {document.file}, so it cannot be deleted")
        return
    key, equals, value = text.lstrip("+").partition("=")
    if not equals or not key.strip():
        document.report(where, "is not an override; write `key=value`, or `~key` to delete")
        return
    path = expand((), key.strip())
    try:
        node = read_value(path, value)
    except RecipeError:
        document.report(where, "the value is not valid YAML; put it in quotes if it is text")
        document.broken.add(path)
        return
    document.remove(path)
    document.add(path, node, where)


def read_value(path: KeyPath, text: str) -> yaml.Node:
    """As YAML; but a key that takes text only takes it as it stands, unless it is in quotes or null."""
    key = find_key(path)
    if key is not None and key.text_only and not text.startswith(("'", '"')) and text.strip() not in NULLS:
        return as_text(text)
    try:
        node = compose(text, "override")
    except RecipeError:
        if path[:-1] == PLACEMENT or (key is not None and key.takes_text):
            return as_text(text)
        raise
    if node is None:
        return yaml.ScalarNode("tag:yaml.org,2002:str", "")
    if isinstance(node, yaml.MappingNode) and not text.lstrip().startswith("{"):
        return as_text(text)  # `key: value` after an equals sign is a sentence with a colon
    return node


def as_text(text: str) -> yaml.Node:
    return yaml.ScalarNode("tag:yaml.org,2002:str", text, style="'")
