"""An index is a folder. What is in it stands in `manifest.json`, which is written last: without it, the folder is the
rest of a build that did not end."""

import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from corral.observe.run_files import write_atomically
from corral.recipe.errors import UserError
from corral.retrieval.corpus import CorpusFacts, same_file

MANIFEST = "manifest.json"
BUILDING = "building.json"
"""The same, while it is being built: so that only the same build is gone on with."""
OFFSETS = "offsets.npy"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    kind: str
    corpus: CorpusFacts
    settings: dict[str, Any]
    """Of the kind: BM25's parameters, or the encoder's."""
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=2) + "\n")

    def differs_from(self, other: "Manifest") -> list[str]:
        """What is not the same, as far as the result of a build goes."""
        mine, its = asdict(self), asdict(other)
        names = [name for name in ("kind", "format") if mine[name] != its[name]]
        names += sorted(
            key for key in {*self.settings, *other.settings} if self.settings.get(key) != other.settings.get(key)
        )
        return names + ["corpus"] * (self.corpus.sha256 != other.corpus.sha256)


def read(path: Path) -> Manifest:
    try:
        fields = json.loads(path.read_text())
        if (number := fields["format"]) == FORMAT:
            return Manifest(**{**fields, "corpus": CorpusFacts(**fields["corpus"])})
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not the manifest of an index: {error}") from error
    raise UserError(f"{path} has format {number}, this version of corral reads {FORMAT}; build the index again")


def read_finished(folder: Path) -> Manifest:
    """Of an index that can be searched."""
    if (folder / MANIFEST).is_file():
        return read(folder / MANIFEST)
    if (folder / BUILDING).is_file():
        raise UserError(f"the index {folder} is unfinished: run the same `corral retriever build` again")
    raise UserError(f"{folder} is not an index; `corral retriever build CORPUS {folder}` makes one")


def corpus_of(manifest: Manifest, folder: Path, given: Path | None) -> Path:
    """Where the corpus is now. It must be the one that the index was built from, to the last byte."""
    path = given or Path(manifest.corpus.path)
    if given is None and not path.is_file():
        raise UserError(f"the corpus of {folder} is no longer at {path}; say where it is with --corpus")
    if not same_file(path, manifest.corpus):
        raise UserError(f"{path} is not what the index {folder} was built from; build it again")
    return path


def installed_versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in ("corral", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
