"""Tables: one row for every key of another system, with what becomes of it in Corral.

The table of a system is the file `tables/SYSTEM.yaml`, with what `common.yaml` has for all of them, and the few
conversions that need code are functions in that system's modules. `load_table("verl", batch, kl)` makes a `KeyTable` of
file and modules. The file has:

    title: verl                       # the system's name in reports
    aliases:                          # other spellings of keys; `a.**` stands for all that is below
      data.shuffle_train_dataloader: data.shuffle
    conditions:                       # tests, each with the reason why a key has no effect where it fails
      has_critic: there is no critic
      loss_is: the loss is not {0}    # {0} is the argument, as of `when: loss_is(sapo)`
    constants:                        # what functions look up: config.constants["losses"]
      losses: {vanilla: ppo, geo_mean: gmpo}
    kinds:                            # other kinds of run, by keys that are on or have a value: no recipe
      preference optimization: chosen_key runner.task_type=dpo
    needs: {model: actor.**, else: a.** b}  # one of these keys, if `model` is written; else one of the others
    own defaults: {save_steps: 50}    # of configurations that is_whole(config), other than those of the rows
    blocks:                           # rows that occur several times, with <names> to be filled in
      optimizer:
      - <role>.optim.lr: {to: <ours>.learning_rate, kind: number, default: <lr>}
    rows:
    - trainer.nnodes: {to: cluster.nodes, kind: integer, default: 1}                  # the same under another name
      data.seed: {to: seed, kind: integer, null: left to Corral}                      # null is built in, of any row
      trainer.logger: {convert: trackers, kind: texts, default: [console, wandb]}     # trackers(config, given)
      actor.clip_low: {convert: "clip(low)", kind: number, when: loss_is(ppo)}        # clip(config, given, "low")
      trainer.device: {only: [cuda, cpu], kind: text, built in: what is there, otherwise: Corral has no others}
      trainer.resume_mode:            # by the value: mapped, converted if there is a `note`, a fate, or an error
        cases: {auto null: {set: {checkpoint.resume: auto}}, path: {unsupported: no}, else: {refuse: should be auto}}
        kind: text
      trainer.total_epochs:           # the first rule that applies; what is in braces is filled in
        rules:
        - {if: written(trainer.total_training_steps), no effect: "`total_training_steps` decides"}
        - {if: nonpositive, refuse: should be above 0}
        - {to: schedule.epochs, note: "{value} passes over {num_rows} rows"}         # num_rows(config)
      actor.use_dynamic_bsz: {built in: always on, kind: boolean, default: false}     # a fate, with kind or default
      data.sampler.path: {switch: not supported}     # turns on all that is below data.sampler; `off: x` is off, too
    - built in:                       # Corral does so anyway, or decides it by itself, whatever the value: reason, keys
        speed and memory: model.{use_shm,use_liger} model.tiled_mlp{,.**}
    - no effect:                      # nothing reads it in the other system
        for images only: data.image_patch_size
    - unsupported:                    # whatever the value
        rows are read in order: data.curriculum
    - unsupported unless off:         # null, false, 0 and empty are built in
        this is `corral evaluate`: trainer.val_only
    - defaults: {data.seed: 1}        # rows of the table that this one is based on, with other defaults
    base rows: a.b c.**               # of the rows of that table only these are taken, and conversions and the like
    - when: has_critic                # rows under a condition
      rows:
      - {block: optimizer, role: critic, ours: critic.optimizer, lr: 1e-5}

Keys are `a.b`; `*` stands for any one name, and `.**` at the end for all that is below. Braces expand as in a shell,
and spaces separate keys. Rows are read in the order of the file. A key's row is the one with its very name, else the
first that fits it. `default` is what the other system takes where nothing is written; null is a default, too. `kind` is
a function of `value_kinds.py` or of the system's modules that reads a value, and raises a ValueError for another kind.
Arguments in brackets behind a function's name follow those that it gets anyway: `kind: choice(a, b)` is
choice(value, "a", "b").

A case or a rule has `to` (mapped, as `value` where that is given, or as what the constant `as` has for it), `set`
(several keys; with a `note` converted, with `unsupported` what takes its place), `convert`, a fate, `refuse`. A note
under `differs` says that the training is not quite the same, and stands first in the report. In `if` and `when` stand
tests, joined by `not`, `and`, `or`: those of TESTS on the value or on another key, conditions, the
file's own `tests`, and comparisons (`loss_of == ppo`, `value > {num_devices}`). In braces and before a comparison stand
`value`, `config[a.b]` for the value of another key, `meant[a.b]` for that or its default where it is null, `title`,
`constants[losses]`, functions of the configuration (`lengths.0` is a part of what one gives), whole numbers, and
sums of these, which are worked out from left to right whatever the signs: `num_devices // size - 1`. Rules that several
keys have are in `conversions`, and are named as functions are. In these and in `tests`, `<0>` is the first argument.
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import yaml

from corral.migrate import outcome as outcomes
from corral.migrate import value_kinds
from corral.migrate.outcome import ABSENT, ForeignValue, Outcome, built_in, converted, mapped, no_effect, unsupported
from corral.migrate.table import Convert, ForeignConfig, KeyRow, KeyTable, expand_keys, fits
from corral.migrate.value_kinds import anything, format_value, plural
from corral.recipe.document import compose, plain, plain_scalar, read_text

CALL = re.compile(r"([\w.]+)(?:\((.*)\))?", re.DOTALL)
PLACEHOLDER = re.compile(r"<(\w+)>()")
FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]+))?\}")
LOOK_UP = re.compile(r"(config|meant|constants)\[([^\[\]]+)\]")
COMPARISON = re.compile(r"(.+) (==|<|>) (.+)")
SUM = re.compile(r"(.+) ([-+*/%]|//) (.+)")
SPEC = {"convert", "cases", "rules", "only", "otherwise", "switch", "off", "null", "kind", "default", "when"}
"""Properties that a key may have in a table's file, besides what it has in common with a rule."""
DECISION = {"to", "value", "as", "note", "differs", "set", "refuse"}
"""What a rule may say, besides a fate."""
INHERITED = ("aliases", "kinds", "conditions", "tests", "constants", "own defaults", "blocks", "conversions")

Test = Callable[[ForeignConfig, ForeignValue], bool]

FATES: dict[str, Callable[[str], Convert]] = {
    "built in": lambda reason: lambda *_: built_in(reason),
    "no effect": lambda reason: lambda *_: no_effect(reason),
    "unsupported": lambda reason: lambda *_: unsupported(reason),
    "unsupported unless off": lambda reason: (
        lambda _, given: unsupported(reason) if given.value else built_in("off, as in Corral")
    ),
}
TESTS: dict[str, Callable[..., bool]] = {
    "unset": lambda _, given: given.value is None,
    "off": lambda _, given: not given.value,
    "nonpositive": lambda _, given: given.value is None or given.value <= 0,
    "negative": lambda _, given: given.value is None or given.value < 0,
    "is": lambda _, given, *values: given.value in values,
    "outside": lambda _, given, least, most: given.value is not None and not least <= given.value <= most,
    "starts": lambda _, given, start: str(given.value or "").startswith(start),
    "ends": lambda _, given, end: str(given.value or "").endswith(end),
    "among": lambda config, given, names: given.value in config.constants[names],
    "default": lambda _, given: not given.where,
    "same": lambda config, given, key: given.value is None or given.value == config[key],
    "written": lambda config, _, key: key in config,
    "on": lambda config, _, key: bool(config[key]),
    "says": lambda config, _, key, *values: config[key] in values,
    "means": lambda config, _, key, *values: config.value(key) in values,
    "positive": lambda config, _, key: (config[key] or 0) > 0,
}
"""Tests on a value, and on those of other keys. Null is nonpositive, negative, and the same as anything."""
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "<": operator.lt, ">": operator.gt, "-": operator.sub, "+": operator.add, "*": operator.mul,
    "/": operator.truediv, "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip


def load_table(system: str, *modules: ModuleType, base: KeyTable | None = None) -> KeyTable:
    """`modules` define the functions that the file names. Rows and aliases of `base` follow where the file has none."""
    path = Path(__file__).parent / "tables" / f"{system}.yaml"
    return read_table(read_text(path), str(path), *modules, base=base)


def read_table(text: str, source: str, *modules: ModuleType, base: KeyTable | None = None) -> KeyTable:
    # All tables are read whenever a file is migrated. In Python that takes a second; libyaml is twelve times as fast.
    node = compose(text, source, getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    assert node is not None, source
    document = plain(node)
    inherited = base.document if base else common()
    for name in INHERITED:
        document[name] = {**inherited.get(name, {}), **document.get(name, {})}
    functions = functions_of((outcomes, value_kinds, *modules))
    rows = list(_TableReader(document, functions, base).rows(document["rows"]))
    aliases: dict[str, str] = {}
    for old, new in document["aliases"].items():
        spellings, keys = list(expand_keys(old)), list(expand_keys(new))
        aliases |= zip(spellings, keys if len(keys) > 1 else keys * len(spellings), strict=True)
    if base is not None:
        own, taken = {row.key for row in rows}, list(expand_keys(document.get("base rows", "**")))
        rows += [row for row in base.rows if row.key not in own and any(fits(one, row.key) for one in taken)]
    is_whole = functions["is_whole"] if document["own defaults"] else KeyTable.is_whole
    return KeyTable(document["title"], tuple(rows), aliases, document, is_whole)


@cache
def common() -> Mapping[str, Any]:
    """What the tables of all systems have in common."""
    node = compose(read_text(Path(__file__).parent / "tables" / "common.yaml"), "common.yaml")
    assert node is not None
    return cast(Mapping[str, Any], plain(node))


def functions_of(modules: Iterable[ModuleType]) -> dict[str, Callable[..., Any]]:
    """What the modules define themselves; no two of them may use one name."""
    functions: dict[str, Callable[..., Any]] = {}
    for module in modules:
        own = {name: one for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__}
        assert not own.keys() & functions.keys(), (module, own.keys() & functions.keys())
        functions |= own
    return functions


def filled(item: Any, pattern: "re.Pattern[str]", look_up: Callable[[str], Any]) -> Any:
    """An item with values for what the pattern finds in it: all of a text as it is, a part of it as text."""
    if isinstance(item, dict):
        return {filled(key, pattern, look_up): filled(value, pattern, look_up) for key, value in item.items()}
    if isinstance(item, list):
        return [filled(value, pattern, look_up) for value in item]
    if not isinstance(item, str):
        return item
    whole = pattern.fullmatch(item)
    if whole and not whole[2]:
        return look_up(whole[1])
    return pattern.sub(lambda match: in_style(look_up(match[1]), match[2] or ""), item)


def in_style(value: Any, style: str) -> str:
    """`{names:names}` lists what a mapping has, `{count:update(s)}` counts, and else a style is that of Python."""
    if style == "names":
        return ", ".join(value)
    if style.endswith("(s)"):
        return plural(value, style.removesuffix("(s)"))
    return format(value, style) if style else format_value(value)


def provided(row: KeyRow, applies: Test, reason: str) -> KeyRow:
    """A row that counts under a condition only, and else has no effect for the given reason."""

    def convert(config: ForeignConfig, given: ForeignValue) -> Outcome:
        return row.convert(config, given) if applies(config, given) else no_effect(reason)

    return replace(row, convert=convert)


class _TableReader:
    def __init__(
        self, document: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]], base: KeyTable | None
    ) -> None:
        self.functions, self.base = functions, base
        self.blocks, self.conversions = document["blocks"], document["conversions"]
        self.conditions, self.tests = document["conditions"], document["tests"]

    def rows(self, items: Sequence[Mapping[str, Any]]) -> Iterator[KeyRow]:
        for item in items:
            if "block" in item:
                yield from self.rows(filled(self.blocks[item["block"]], PLACEHOLDER, item.__getitem__))
            elif "defaults" in item:
                assert self.base is not None
                known = {row.key: row for row in self.base.rows}
                yield from (replace(known[key], default=value) for key, value in item["defaults"].items())
            elif "rows" in item:
                yield from (self._conditional(row, item["when"]) for row in self.rows(item["rows"]))
            else:
                for name, entry in item.items():
                    yield from self._fate(name, entry) if name in FATES else self._keys(name, entry)

    def _fate(self, fate: str, keys_by_reason: Mapping[str, str]) -> Iterator[KeyRow]:
        for reason, keys in keys_by_reason.items():
            for key in expand_keys(keys):
                yield KeyRow(key, anything, FATES[fate](reason))

    def _keys(self, keys: str, spec: Mapping[str, Any]) -> Iterator[KeyRow]:
        assert spec.keys() <= SPEC | DECISION | FATES.keys(), (keys, spec)
        for key in expand_keys(keys):
            rows = self._switch(key, spec) if "switch" in spec else [self._row(key, spec)]
            yield from (self._conditional(row, spec["when"]) for row in rows) if "when" in spec else rows

    def _row(self, key: str, spec: Mapping[str, Any]) -> KeyRow:
        kind = self._function(spec.get("kind", "anything"))
        convert = self._convert(spec)
        if "null" in spec:
            convert = first_of([(TESTS["unset"], FATES["built in"](spec["null"])), (self._test(""), convert)])
        return KeyRow(key, kind, convert, spec.get("default", ABSENT))

    def _convert(self, spec: Mapping[str, Any]) -> Convert:
        if "convert" in spec:
            return self._named(spec["convert"])
        if "cases" in spec:
            made = [(values.split(), self._decision(case)) for values, case in spec["cases"].items()]
            cases = {value: decide for values, decide in made for value in values}
            return lambda config, given: cases.get(format_value(given.value), cases["else"])(config, given)
        if "rules" in spec:
            return self._rules(spec["rules"])
        if "only" in spec:
            allowed, note, otherwise = (*spec["only"], None), spec["built in"], spec["otherwise"]
            return lambda _, given: built_in(note) if given.value in allowed else unsupported(otherwise)
        return self._decision(spec)

    def _switch(self, key: str, spec: Mapping[str, Any]) -> Iterator[KeyRow]:
        """A part of the other system that Corral lacks, with the key that turns it on."""
        place, why, off = key.rpartition(".")[0], spec["switch"], spec.get("off")

        def is_on(config: ForeignConfig, given: ForeignValue) -> bool:
            return bool(config[key]) and config[key] != off

        yield KeyRow(key, anything, lambda *given: unsupported(why) if is_on(*given) else built_in("off, as in Corral"))
        yield KeyRow(place, anything, FATES["built in"]("off, as in Corral"))
        yield provided(KeyRow(f"{place}.**", anything, FATES["unsupported"](f"see `{key}`")), is_on, f"`{key}` is off")

    def _named(self, call: str) -> Convert:
        name, arguments = call_of(call)
        if name not in self.conversions:
            return self._function(call)
        return self._rules(with_arguments(self.conversions[name], arguments))

    def _rules(self, items: Sequence[Mapping[str, Any]]) -> Convert:
        return first_of([(self._test(rule.get("if", "")), self._decision(rule)) for rule in items])

    def _decision(self, case: Mapping[str, Any]) -> Convert:
        """What a case or a rule says."""
        if "convert" in case:
            return self._named(case["convert"])
        parts = {name: part for name, part in case.items() if name in DECISION or name in FATES}

        def decide(config: ForeignConfig, given: ForeignValue) -> Outcome:
            rule = filled(parts, FIELD, lambda name: self._value(name, config, given))
            if "refuse" in rule:
                raise ValueError(rule["refuse"])
            differs = "differs" in rule
            note = rule["differs"] if differs else rule.get("note", "")
            if "to" in rule:
                value = config.constants[rule["as"]][given.value] if "as" in rule else rule.get("value", given.value)
                return replace(mapped(rule["to"], value, note), differs=differs)
            if "set" in rule:
                found = converted(rule["set"], note or rule.get("unsupported", ""), differs)
                return replace(
                    found, status="unsupported" if "unsupported" in rule else "converted" if found.note else "mapped"
                )
            [(fate, reason)] = rule.items()
            return FATES[fate](reason)(config, given)

        return decide

    def _conditional(self, row: KeyRow, when: str) -> KeyRow:
        name, arguments = (when, []) if when in self.conditions else call_of(when)
        return provided(row, self._test(when), self.conditions[name].format(*arguments))

    def _test(self, text: str) -> Test:
        """`a and not b or c`; nothing is true."""
        if " or " in text or " and " in text:
            some = [[self._test(one) for one in part.split(" and ")] for part in text.split(" or ")]
            return lambda *given: any(all(test(*given) for test in tests) for tests in some)
        if text.startswith("not "):
            test = self._test(text.removeprefix("not "))
            return lambda *given: not test(*given)
        if not text:
            return lambda *_: True
        if comparison := COMPARISON.fullmatch(text):
            left, sign, right = comparison.groups()
            return lambda *given: OPERATORS[sign](self._value(left, *given), self._literal(right, *given))
        name, arguments = call_of(text)
        if name in self.tests:
            return self._test(with_arguments(self.tests[name], arguments))
        if name in TESTS:
            return lambda *given: TESTS[name](*given, *arguments)
        assert name.partition(".")[0] in self.functions, text
        return lambda *given: bool(self._value(text, *given))

    def _literal(self, text: str, *given: Any) -> Any:
        """A value as in YAML, or what is in braces."""
        return self._value(text[1:-1], *given) if FIELD.fullmatch(text) else plain_scalar(text)

    def _value(self, name: str, config: ForeignConfig, given: ForeignValue) -> Any:
        if match := LOOK_UP.fullmatch(name):
            look_up = {"config": config.__getitem__, "meant": config.value, "constants": config.constants.get}
            return look_up[match[1]](match[2])
        if match := SUM.fullmatch(name):
            left, sign, right = match.groups()
            return OPERATORS[sign](self._value(left, config, given), self._value(right, config, given))
        if name in ("value", "title"):
            return config.table.title if name == "title" else given.value
        if name.isdigit():
            return int(name)
        call, arguments = call_of(name)
        call, _, part = call.partition(".")
        function = self.functions[call]
        found = function(config, given, *arguments) if takes_given(function) else function(config, *arguments)
        return (found[int(part)] if part.isdigit() else getattr(found, part)) if part else found

    def _function(self, call: str) -> Callable[..., Any]:
        name, arguments = call_of(call)
        function = self.functions[name]
        return (lambda *values: function(*values, *arguments)) if arguments else function


@cache
def takes_given(function: Callable[..., Any]) -> bool:
    return "given" in signature(function).parameters


def with_arguments(item: Any, arguments: Sequence[Any]) -> Any:
    return filled(item, PLACEHOLDER, lambda place: arguments[int(place)])


def first_of(rules: Sequence[tuple[Test, Convert]]) -> Convert:
    return lambda *given: next(rule for test, rule in rules if test(*given))(*given)


def call_of(text: str) -> tuple[str, list[Any]]:
    """`name(a, 1)` is the name and its arguments."""
    match = CALL.fullmatch(text)
    assert match is not None, text
    return match[1], [plain_scalar(argument.strip()) for argument in match[2].split(",")] if match[2] else []
