"""Tables of keys as files."""

from types import ModuleType

import pytest

from corral.migrate.outcome import ForeignValue, Outcome, mapped
from corral.migrate.table import ForeignConfig, KeyTable, nearest_name
from corral.migrate.table_file import read_table

TABLE = """
title: Test
aliases:
  "{old,older}.**": new.**
  "{one,two}.lr": "{three,four}.lr"
conditions:
  has_critic: there is no critic
  loss_is: the loss is not {0}
  loss_of == ppo: the loss is not PPO
tests:
  is_large: on(algorithm) and value > 10 or value == {limit_of(3)}
constants:
  precisions: {bf16: bfloat16, fp16: float16}
own defaults: {nodes: 4}
conversions:
  precision:
  - {if: not among(precisions), refuse: "should be one of {constants[precisions]:names}"}
  - {to: <0>.dtype, as: precisions}
blocks:
  optimizer:
  - <role>.lr: {to: <ours>.learning_rate, kind: number, default: <lr>}
rows:
- nodes: {to: cluster.nodes, kind: integer, default: 1}
  seed: {to: seed, kind: integer, null: left to Corral}
  algorithm: {built in: ours, kind: text, default: grpo}
  clip_{low,high}: {convert: "clip(0.5)", kind: number, when: loss_is(ppo)}
  loss: {built in: chosen, kind: "choice(ppo, gspo)", default: null}
  device: {only: [cuda, cpu], kind: text, built in: what is there, otherwise: no others}
  sampler.path: {switch: no samplers, off: none}
  precision: {convert: precision(model), kind: text}
  batch:
    rules:
    - {if: is_large, unsupported: "{value:sample(s)} on {meant[nodes]} nodes", set: {batch.size: "{value - 1}"}}
    - {if: unset or default, no effect: "nobody asked, of {title}"}
    - {set: {batch.size: "{value}", batch.nodes: "{config[nodes]}"}, note: "{value:.1f} of {loss_of}"}
    default: 2
    kind: number
  ratio: {to: algorithm.ratio, value: "{bounds.1}", when: loss_of == ppo}
- built in:
    speed: new.{a, b} new.c{,.**}
- no effect:
    for pictures only: images
- unsupported:
    never: curriculum
- unsupported unless off:
    "this is `corral evaluate`": val_only
- when: has_critic
  rows:
  - {block: optimizer, role: critic, ours: critic.optimizer, lr: 1e-5}
"""


def make() -> KeyTable:
    def clip(config: ForeignConfig, given: ForeignValue, factor: float) -> Outcome:
        return mapped("algorithm.clip", factor)

    def choice(value: str, *choices: str) -> str:
        if value not in choices:
            raise ValueError("one of them")
        return value

    functions = {
        "clip": clip,
        "choice": choice,
        "has_critic": lambda config: config["algorithm"] == "gae",
        "loss_is": lambda config, name: config["loss"] == name,
        "loss_of": lambda config: config["loss"],
        "limit_of": lambda config, given, factor: factor if given.where else 0,
        "bounds": lambda config: (0, 1),
        "is_whole": lambda config: "loss" in config,
    }
    module = ModuleType("made_for_a_test")
    for name, function in functions.items():
        function.__module__ = module.__name__
        setattr(module, name, function)
    return read_table(TABLE, "test", module)


@pytest.mark.parametrize(
    ("given", "key", "fate"),
    [
        ({"nodes": 2}, "nodes", "mapped {'cluster.nodes': 2} "),
        ({"seed": None}, "seed", "built in {} left to Corral"),
        ({"seed": 3}, "seed", "mapped {'seed': 3} "),
        ({"clip_low": 1}, "clip_low", "no effect {} the loss is not ppo"),
        ({"clip_high": 1, "loss": "ppo"}, "clip_high", "mapped {'algorithm.clip': 0.5} "),
        ({"device": "npu"}, "device", "unsupported {} no others"),
        ({"device": None}, "device", "built in {} what is there"),
        ({"sampler.path": "x"}, "sampler.path", "unsupported {} no samplers"),
        ({"sampler.path": "none"}, "sampler.path", "built in {} off, as in Corral"),
        ({"sampler.seed": 1}, "sampler.seed", "no effect {} `sampler.path` is off"),
        ({"precision": "bf16"}, "precision", "mapped {'model.dtype': 'bfloat16'} "),
        ({"batch": 11}, "batch", "unsupported {'batch.size': 10} 11 samples on 1 nodes"),
        ({"batch": 11, "loss": "ppo"}, "batch", "unsupported {'batch.size': 10} 11 samples on 4 nodes"),
        ({"batch": 3}, "batch", "unsupported {'batch.size': 2} 3 samples on 1 nodes"),
        ({"batch": 2.5, "loss": "ppo"}, "batch", "converted {'batch.size': 2.5, 'batch.nodes': 4} 2.5 of ppo"),
        ({"ratio": 7, "loss": "ppo"}, "ratio", "mapped {'algorithm.ratio': 1} "),
        ({"ratio": 7, "loss": "gspo"}, "ratio", "no effect {} the loss is not PPO"),
        ({"older.b": 1}, "older.b", "built in {} speed"),
        ({"new.c.d.e": 1}, "new.c.d.e", "built in {} speed"),
        ({"images": 1}, "images", "no effect {} for pictures only"),
        ({"curriculum": 0}, "curriculum", "unsupported {} never"),
        ({"val_only": 0}, "val_only", "built in {} off, as in Corral"),
        ({"val_only": 1}, "val_only", "unsupported {} this is `corral evaluate`"),
        ({"critic.lr": 0.5}, "critic.lr", "no effect {} there is no critic"),
        ({"critic.lr": 0.5, "algorithm": "gae"}, "critic.lr", "mapped {'critic.optimizer.learning_rate': 0.5} "),
    ],
)
def test_every_form_of_a_row_says_what_becomes_of_its_key(given: dict[str, object], key: str, fate: str) -> None:
    config = ForeignConfig(make(), {one: ForeignValue(one, value, "test") for one, value in given.items()})
    _, reports = config.read()
    [outcome] = [report.outcome for report in reports if report.given.key == key]
    ours = {".".join(path): value for path, value in outcome.ours.items()}
    assert f"{outcome.status} {ours} {outcome.note}" == fate


def test_a_rule_refuses_with_the_names_that_it_knows() -> None:
    config = ForeignConfig(make(), {"precision": ForeignValue("precision", "int8", "test")})
    config.read()
    assert config.problems == ["test: `precision=int8` should be one of bf16, fp16"]


def test_defaults_are_read_where_nothing_is_written() -> None:
    settings, reports = ForeignConfig(make(), {"algorithm": ForeignValue("algorithm", "gae", "test")}).read()
    values = {".".join(path): one.value for path, one in settings.items()}
    assert values == {"cluster.nodes": 1, "critic.optimizer.learning_rate": 1e-5}
    assert len(reports) == 1


def test_aliases_are_expanded_side_by_side() -> None:
    assert make().canonical("two.lr") == "four.lr"
    assert make().canonical("old.x.y") == "new.x.y"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lora_rank", None),
        ("data.trian_batch", "data.train_batch"),
        ("train_batch", "data.train_batch"),
        ("data.trainbatch", "data.train_batch"),
    ],
)
def test_a_suggestion_is_the_same_name_elsewhere_or_is_spelled_alike(written: str, meant: str | None) -> None:
    assert nearest_name(written, ["local_rank", "data.train_batch", "data.**"]) == meant


def test_a_key_in_two_spellings_is_reported_twice() -> None:
    given = {one: ForeignValue(one, 1, "test") for one in ("old.c.d", "new.c.d")}
    _, reports = ForeignConfig(make(), given).read()
    assert sorted(report.given.key for report in reports) == ["new.c.d", "old.c.d"]
