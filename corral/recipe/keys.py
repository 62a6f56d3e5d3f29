"""Questions about the schema: which keys there are, what each one expects, and which one was probably meant."""

import json
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from corral.recipe.parts import KINDS
from corral.recipe.schema import NamedChoice, PartChoice, Recipe, Section

KeyPath = tuple[str, ...]

PLACEMENT: KeyPath = ("cluster", "placement")
ANY = "*"
"""In a path, a name of the user's choice: `environments.*.weight`."""

LONGEST_NAME = 200
"""In characters, of what similar names are looked for: a comparison takes as long as the product of two lengths."""
NEAR, FAR = 0.75, 0.7
"""How alike a key is that was probably meant, and two last names (as an upper bound, which is quick) whose keys cannot
be that: with names of 0.7, whole paths count for a tenth."""

COMPARISONS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

HABITS = {
    "lr": "optimizer.learning_rate",
    "n": "batch.samples_per_prompt",
    "num_generations": "batch.samples_per_prompt",
    "group_size": "batch.samples_per_prompt",
    "batch_size": "batch.prompts_per_step",
    "train_batch_size": "batch.prompts_per_step",
    "max_tokens": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "num_iterations": "batch.ppo_epochs",
    "per_device_train_batch_size": "batch.prompts_per_step",
    "beta": "algorithm.kl.coefficient",
    "kl_coef": "algorithm.kl.coefficient",
    "clip_ratio": "algorithm.loss.clip_low",
    "grad_clip": "optimizer.max_gradient_norm",
    "total_steps": "schedule.steps",
    "total_epochs": "schedule.epochs",
    "save_freq": "checkpoint.every",
    "test_freq": "validation.every",
}
"""What other frameworks call our keys, where the spelling alone would not lead there."""


@dataclass(frozen=True)
class Key:
    path: KeyPath
    annotation: Any
    """With `Annotated` and its limits kept."""
    section: type[Section] | None
    """What is below this key, if it is a section."""
    field: FieldInfo

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> Any:
        """As it would be written in YAML."""
        assert not self.required
        value = self.field.get_default(call_default_factory=False)
        return {} if isinstance(value, Section) else json.loads(json.dumps(value))

    @property
    def free_form(self) -> bool:
        """Below it the user's own keys, not ours."""
        return get_origin(self.annotation) is dict and not self.named_sections

    @property
    def named_sections(self) -> bool:
        """Below it names of the user's choice, and below these keys of ours."""
        return get_origin(self.annotation) is dict and _section_of(get_args(self.annotation)[1]) is not None

    @property
    def value_annotation(self) -> Any:
        """Of what is below a free-form key."""
        return get_args(self.annotation)[1]

    @property
    def optional(self) -> bool:
        return type(None) in _alternatives(self.annotation)

    @property
    def takes_text(self) -> bool:
        return str in _alternatives(self.annotation)

    @property
    def text_only(self) -> bool:
        return set(_alternatives(self.annotation)) <= {str, type(None)}

    @property
    def is_part(self) -> bool:
        """A name, or a section with the name and options: a declared part of the algorithm, an engine."""
        return self.section is not None and issubclass(self.section, NamedChoice)


@cache
def all_keys() -> dict[KeyPath, Key]:
    return {key.path: key for key in _keys_of(Recipe, ())}


def pattern_of(path: KeyPath) -> KeyPath:
    """With `ANY` for the user's own names of sections."""
    found: KeyPath = ()
    for name in path:
        above = all_keys().get(found)
        found = (*found, ANY if above is not None and above.named_sections else name)
    return found


def find_key(path: KeyPath) -> Key | None:
    return all_keys().get(pattern_of(path))


def dotted(path: Iterable[str]) -> str:
    return ".".join(path)


def expand(prefix: KeyPath, written: str) -> KeyPath:
    """`a.b` below `prefix`. In the placement a key is a list of roles and stays whole."""
    path = prefix
    parts = written.split(".")
    for index, part in enumerate(parts):
        if path == PLACEMENT:
            return (*path, ".".join(parts[index:]))
        path = (*path, part)
    return path


def in_free_form(path: KeyPath) -> bool:
    """Whether keys right below this path are the user's own."""
    key = find_key(path)
    if key is not None and key.named_sections:
        return True
    return any((key := find_key(path[:end])) is not None and key.free_form for end in range(len(path) + 1))


def required_below(path: KeyPath) -> list[KeyPath]:
    """The keys that have to be written when `path` is left out."""
    key = find_key(path)
    assert key is not None
    if key.section is None:
        return [path]
    below = [other.path[-1] for other in all_keys().values() if other.path[:-1] == key.path and other.required]
    if not below:  # one of its keys has to be there: a source has a path, or several sources
        return [(*path, next(iter(key.section.model_fields)))]
    return [leaf for name in below for leaf in required_below((*path, name))]


def nearest_key(path: KeyPath) -> str | None:
    """The key that was probably meant: same name in another section, a habit, or a similar spelling anywhere."""
    if len(dotted(path)) > LONGEST_NAME:
        return None
    known_keys = [_named_like(path, known) for known in all_keys()]
    likeness = _likeness_to(path)
    best = max((known for known in known_keys if ANY not in known), key=likeness)
    if likeness(best) >= 1:
        return dotted(best)
    if path[-1] in HABITS:
        return HABITS[path[-1]]
    return dotted(best) if likeness(best) >= NEAR else None


def nearest(word: str, choices: Iterable[str]) -> str | None:
    if len(word) > LONGEST_NAME:
        return None
    matches = get_close_matches(word.lower(), list(choices), n=1)
    return matches[0] if matches else None


def did_you_mean(suggestion: str | None) -> str:
    return f"; did you mean `{suggestion}`?" if suggestion else ""


def choices_of(annotation: Any) -> list[str]:
    """The names among which a key chooses, wherever in the annotation they are."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in choices_of(part)]


def describe(annotation: Any) -> str:
    """What a key expects, to follow `should be`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe_limited(parts[0], parts[1:])
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, parts))
    if origin is list:
        return f"a list (each item {describe(parts[0])})"
    if origin is tuple:
        return f"a list of {len(parts)} (each {describe(parts[0])})"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return "a section, with its keys indented below it"
    texts = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return texts.get(annotation, str(annotation))


def _describe_limited(kind: Any, metadata: Iterable[Any]) -> str:
    """`metadata`: limits such as annotated_types.Ge(1), or pydantic's fields that have them."""
    all_limits = [one for entry in metadata for one in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    limits = {name: getattr(one, name) for one in all_limits for name in COMPARISONS if hasattr(one, name)}
    if limits.get("ge") is not None and limits.get("ge") == limits.get("le"):
        return f"{limits['ge']}"
    return f"{describe(kind)}, {' and '.join(f'{COMPARISONS[name]} {value}' for name, value in limits.items())}"


def _keys_of(section: type[Section], prefix: KeyPath) -> Iterator[Key]:
    annotations = get_type_hints(section, include_extras=True)
    for name, field in section.model_fields.items():
        below, path = _section_of(annotations[name]), (*prefix, name)
        key = Key(path, annotations[name], below, field)
        yield key
        if key.named_sections:
            below, path = _section_of(get_args(annotations[name])[1]), (*path, ANY)
            yield Key(path, below, below, field)
        if below is not None:
            yield from _keys_of(below, path)
        if below is PartChoice:
            yield from _option_keys(path)


def _option_keys(path: KeyPath) -> Iterator[Key]:
    """Options of all the parts that can be chosen; a name that several have means the same in each."""
    options: dict[str, Any] = {}
    for declaration in KINDS[path].declared.values():
        for name, annotation in get_type_hints(declaration.options, include_extras=True).items():
            options.setdefault(name, annotation)
    for name, annotation in options.items():
        yield Key((*path, name), annotation, None, FieldInfo(annotation=annotation, default=None))


def _named_like(path: KeyPath, known: KeyPath) -> KeyPath:
    """`known` with the names of `path` for `ANY`, where they begin alike."""
    for end, name in enumerate(known):
        if name == ANY and len(path) > end and path[:end] == known[:end]:
            known = (*known[:end], path[end], *known[end + 1 :])
    return known


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _section_of(annotation: Any) -> type[Section] | None:
    for part in _alternatives(annotation):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def _likeness_to(path: KeyPath) -> Callable[[KeyPath], float]:
    """How like a known key is: 1 and more for the same last name, then by how alike the names and, less so, the whole
    paths are."""
    # A matcher looks at its second text once, and at the first for each comparison.
    wholes, lasts = SequenceMatcher(None, "", dotted(path)), SequenceMatcher(None, "", path[-1])

    def likeness(known: KeyPath) -> float:
        lasts.set_seq1(known[-1])
        is_begun = len(path[-1]) > 3 and known[-1].startswith(path[-1])
        if not is_begun and lasts.quick_ratio() < FAR:
            return 0.0
        wholes.set_seq1(dotted(known))
        whole = wholes.ratio()
        if path[-1] == known[-1]:
            return 1 + whole
        last = lasts.ratio()
        if is_begun:
            last = max(last, 0.85)
        same_section = path[:-1] == known[:-1]
        return min(0.99, last + 0.05) if same_section else 0.9 * last + 0.1 * whole

    return likeness
