"""How launchers write names and YAML."""

from typing import Any

import yaml


def short_name(name: str, longest: int) -> str:
    """At least two characters, which most of them ask for, and no more than they allow."""
    return (name if len(name) > 1 else f"corral-{name}")[:longest].rstrip("-")


class Dumper(yaml.SafeDumper):
    """Scripts and recipes inside of a document stay readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)


def yaml_text(*documents: Any) -> str:
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
