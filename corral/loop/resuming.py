"""What has changed since a run was last trained: a name that exists goes on from its checkpoint, and must not go on as
something else without anybody noticing.

Every key of the recipe that changed is reported, old and new. `ON_RESUME` says which changes are taken, and which are
refused because they make it another experiment. Compared is what the checkpoint was trained with, which stands in its
`state.json`: a start that failed, or was refused, has trained nothing. Files that the recipe names are compared by
their content, so that an edited reward function is a change, and a folder that was moved is none.
"""

import glob
import hashlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from corral.data.plugins import IN_MEMORY, is_spec, is_users_file, load_object
from corral.observe.run_folder import latest_recipe
from corral.recipe.document import show
from corral.recipe.errors import UserError
from corral.recipe.keys import KeyPath, dotted, pattern_of
from corral.recipe.load import load_recipe
from corral.recipe.schema import Recipe
from corral.training.checkpoint import read_state

Rule = Literal["refused", "taken", "not compared"]

ON_RESUME: Mapping[str, Rule] = {
    "name": "not compared",
    "checkpoint.resume": "not compared",
    "seed": "refused",
    "model": "refused",
    "model.implementation": "taken",
    "model.trust_remote_code": "taken",
    "data": "refused",
    "environment": "refused",
    "environment.timeout_s": "taken",
    "environment.concurrency": "taken",
    "environment.processes": "taken",
    "environment.max_error_rate": "taken",
    "environment.reward.timeout_s": "taken",
    "environment.reward.workers": "taken",
    "environment.reward.concurrency": "taken",
    "environment.reward.on_error": "taken",
    "algorithm": "refused",
    "critic": "taken",
    "critic.path": "refused",
    "reference": "refused",
    "reference.endpoint": "taken",
    "reference.endpoint.model": "refused",
    "reward_model": "refused",
    "reward_model.shard": "taken",
    "rollout": "taken",
    "batch": "taken",
    "optimizer": "taken",
    "train": "taken",
    "schedule": "taken",
    "validation": "taken",
    "checkpoint": "taken",
    "logging": "taken",
    "cluster": "taken",
}
"""What happens to a change of a key, or of a section without its exceptions, when a run goes on. Rules of
`environment` hold for each of `environments`, and those of its `reward` for each of `rewards`."""
NOT_TRAINING = ("validation", "checkpoint", "logging", "cluster")
"""Sections whose keys a finished run may be called with again: they ask for no training."""
NAMES_FILES = ("path", "name", "chat_template")
"""Keys whose values may be files, as may all options."""
MODEL_FILES = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin", ".py")
MAX_PATH_CHARACTERS = 4000
HASHED_BYTES = 64 << 20
"""So much of all files of a key is read: a large file is hashed in blocks from its beginning to its end."""
BLOCK_BYTES = 64 << 10


@dataclass(frozen=True)
class RecipeChange:
    path: KeyPath
    old: Any
    new: Any

    @property
    def rule(self) -> Rule:
        return rule_for(self.path)

    def __str__(self) -> str:
        if self.old == self.new:
            return f"{dotted(self.path)}: the content of {show(self.new)}"
        return f"{dotted(self.path)}: {show(self.old)} -> {show(self.new)}"


def rule_for(path: KeyPath) -> Rule:
    """The rule of the longest key in `ON_RESUME` that the path begins with."""
    path = pattern_of(path)
    if path[0] == "environments":
        path = ("environment", *path[2:])
    if path[:2] == ("environment", "rewards"):
        path = ("environment", "reward", *path[3:])
    return next(rule for end in range(len(path), 0, -1) if (rule := ON_RESUME.get(dotted(path[:end]))) is not None)


def find_changes(checkpoint: Path, recipe: Recipe) -> tuple[list[RecipeChange], str | None]:
    """The changes since the checkpoint was trained, and what could not be compared, if anything."""
    run, known = checkpoint.resolve().parents[1], read_state(checkpoint).get("trained_with", {})
    written = run / Path(known["recipe"]).name if known.get("recipe") else latest_recipe(run)
    if written is None or not written.is_file():
        return [], f"{run} has no recipe to compare with: nobody knows what has changed since"
    try:
        old, new = flat(load_recipe(written)), flat(recipe)
    except UserError as error:
        return [], f"{written} can't be compared with this recipe, since it was written for another release: {error}"
    note, old_hashes = None, known.get("files")
    if old_hashes is None:
        note = f"{checkpoint} does not say what files contained: whether the recipe's were edited since is not known"
        old_hashes = {}
    new_hashes = hash_inputs(recipe)
    found = []
    for path in sorted(old.keys() | new.keys()):
        one, other = old.get(path), new.get(path)
        hashes = old_hashes.get(dotted(path)), new_hashes.get(dotted(path))
        is_same = hashes[0] == hashes[1] if all(hashes) else one == other
        change = RecipeChange(path, one, other)
        if not is_same and change.rule != "not compared":
            found.append(change)
    return found, note


def refuse_changes(changes: Sequence[RecipeChange], run: Path, step: int) -> None:
    """Raises a `UserError` for changes that make it another experiment."""
    refused = [change for change in changes if change.rule == "refused"]
    if refused:
        raise UserError(
            f"{run} was trained for {step} steps with something else: {'; '.join(map(str, refused))}. Give this run "
            f"another `name` (name={run.name}-2), or go on from step {step} with what is there now: --resume-anyway "
            "(in Python resume_anyway=True)"
        )


def refuse_other_steps(changes: Sequence[RecipeChange], step: int) -> None:
    """Raises a `UserError` where steps have another size and the run is as long as its epochs: steps are counted, so
    those that are left would be other epochs."""
    for change in changes:
        if change.path == ("batch", "prompts_per_step"):
            raise UserError(
                f"{change}: with `schedule.epochs` it is not known how many steps are left; set `schedule.steps`, with "
                f"the {step} that were made"
            )


def refuse_finished(changes: Sequence[RecipeChange], run: Path, step: int) -> None:
    """Raises a `UserError` where a finished run is asked for training that it would not do."""
    asked = [change for change in changes if change.path[0] not in NOT_TRAINING]
    if asked:
        raise UserError(
            f"{run} is finished after {step} steps, and would not train with {'; '.join(map(str, asked))}. "
            f"{how_to_go_on(run, step)}"
        )


def how_to_go_on(run: Path, step: int) -> str:
    return f"`schedule.steps={2 * step}` trains it further, `name={run.name}-2` begins another run"


def trained_with(recipe_file: Path, recipe: Recipe) -> dict[str, Any]:
    """What checkpoints keep of it: the recipe's file in the run's folder, and hashes of the files that it names."""
    return {"recipe": recipe_file.name, "files": hash_inputs(recipe)}


def flat(recipe: Recipe) -> dict[KeyPath, Any]:
    """All keys with their values, defaults included."""
    return dict(leaves((), recipe.model_dump(mode="json")))


def leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves((*path, str(name)), inner)
    elif value != {}:
        yield path, value


# --- what files contain


def hash_inputs(recipe: Recipe) -> dict[str, str]:
    """A hash by key, of all keys whose values name files, folders or Python objects that are here."""
    found = {}
    for path, value in flat(recipe).items():
        if rule_for(path) == "refused" and (path[-1] in NAMES_FILES or "options" in path):
            values = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
            content = hash_of_content([one for text in values for one in contents_of(text, path)])
            if content is not None:
                found[dotted(path)] = content
    return found


def contents_of(text: str, key: KeyPath) -> list[Path | bytes]:
    """The files that a value of the recipe names, or the code of a Python object. Of `file.py:name` also the name."""
    if len(text) > MAX_PATH_CHARACTERS or "\n" in text or "\0" in text:
        return []
    location, _, name = text.rpartition(":")
    if location == IN_MEMORY:
        try:
            return [inspect.getsource(load_object(text, name)).encode()]
        except (UserError, OSError, TypeError):
            return []
    if is_spec(text) and name.isidentifier():
        file = Path(location).expanduser() if location.endswith(".py") else file_of_module(location)
        return [name.encode(), file] if file is not None and file.is_file() else []
    path = Path(text).expanduser()
    if "options" in key:  # most of them are words that name no file
        return [path] if ("/" in text or path.suffix) and path.is_file() else []
    if key[-1] == "name":
        return []
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in MODEL_FILES and file.is_file())
    return [Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file()]


def file_of_module(name: str) -> Path | None:
    """A module's file, where that is the user's own. Modules of installed packages are not compared."""
    beside = Path(*name.split(".")).with_suffix(".py")
    if beside.is_file():
        return beside
    try:
        spec = importlib.util.find_spec(name)
    except Exception:  # whatever the package does that the module is in
        return None
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and is_users_file(origin) else None


def hash_of_content(contents: Sequence[Path | bytes]) -> str | None:
    """Of all of them, in order. What it sees of files is described in docs/runs-and-checkpoints.md."""
    files = [one for one in contents if isinstance(one, Path)]
    if not contents:
        return None
    digest = hashlib.sha256()
    for content in contents:
        if isinstance(content, bytes):
            digest.update(content + b"\0")
        else:
            add_file(digest, content, max(HASHED_BYTES // len(files), 2 * BLOCK_BYTES))
    return digest.hexdigest()


def add_file(digest: Any, file: Path, budget: int) -> None:
    size = file.stat().st_size
    digest.update(f"{size}\0".encode())
    num_blocks = -(-size // BLOCK_BYTES)
    num_read = min(num_blocks, budget // BLOCK_BYTES)
    with file.open("rb") as stream:
        for number in range(num_read):
            # Evenly from the first to the last; all of them, where the file is not large.
            block = number if num_read == num_blocks else number * (num_blocks - 1) // (num_read - 1)
            stream.seek(block * BLOCK_BYTES)
            digest.update(stream.read(BLOCK_BYTES))
