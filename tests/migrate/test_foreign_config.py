"""YAML of other systems: files that name files, changes, references."""

from pathlib import Path
from typing import Any

import pytest

from corral.migrate.config import RawConfig, add_file, add_override, read_value
from corral.recipe.errors import RecipeError


def flat(config: RawConfig) -> dict[str, Any]:
    return {key: given.value for key, given in config.flat().items()}


def read(tmp_path: Path, text: str, *overrides: str) -> RawConfig:
    file = tmp_path / "main.yaml"
    file.write_text(text)
    config = RawConfig()
    add_file(config, file)
    for override in overrides:
        add_override(config, override, "command")
    return config


def problems(config: RawConfig) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        config.flat()
    return list(caught.value.problems)


def test_dotted_keys_are_nested_ones(tmp_path: Path) -> None:
    assert flat(read(tmp_path, "a.b: 1\na:\n  c: [1, 2]\n")) == {"a.b": 1, "a.c": [1, 2]}


def test_every_key_has_its_line(tmp_path: Path) -> None:
    given = read(tmp_path, "a:\n  b: 1\nc: 2\n", "a.d=3").flat()
    assert given["a.b"].where == f"{tmp_path}/main.yaml:2"
    assert given["a.d"].where == "command"


def test_overrides_as_hydra_reads_them() -> None:
    config = RawConfig()
    for word in ("a.b=1e-6", "+a.c=true", "++d=[x,y]", "e={f: 1}", "g=null", "h=a: b", "i=", "j='1'", "k=x=y"):
        add_override(config, word, "command")
    assert flat(config) == {
        "a.b": 1e-6,
        "a.c": True,
        "d": ["x", "y"],
        "e.f": 1,
        "g": None,
        "h": "a: b",
        "i": "",
        "j": "1",
        "k": "x=y",
    }


def test_a_tilde_takes_a_key_away(tmp_path: Path) -> None:
    assert flat(read(tmp_path, "a: {b: 1, c: 2}\n", "~a.b")) == {"a.c": 2}


@pytest.mark.parametrize("word", ["data", "=1", "data.x", "--flag", "a b=1", "data.x=[1,2", "a..b=1", "x@y=z"])
def test_a_malformed_override_is_one_clear_error(word: str) -> None:
    config = RawConfig()
    add_override(config, word, "command")
    [problem] = problems(config)
    assert problem.startswith(f"command: `{word}`")


def test_files_that_defaults_name_lie_under_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("path: tiny\nlayers: 2\n")
    (tmp_path / "base.yaml").write_text("steps: 5\nseed: 1\n")
    defaults = ("base", "model/small@actor.model", "_self_", "override hydra/job_logging: stdout")
    text = "defaults:\n" + "".join(f"  - {name}\n" for name in defaults) + "seed: 2\n"
    assert flat(read(tmp_path, text)) == {"steps": 5, "seed": 2, "actor.model.path": "tiny", "actor.model.layers": 2}


def test_files_that_are_not_there_are_remembered(tmp_path: Path) -> None:
    config = read(tmp_path, "defaults:\n  - ../config/traj_envs@_here_\n  - training: fsdp\nzero: ${deepspeed_zero2}\n")
    assert config.missing == ["../config/traj_envs", "training/fsdp"]
    assert flat(config) == {"zero": None}


def test_files_in_a_circle_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("defaults: [main]\n")
    with pytest.raises(RecipeError, match="name each other in a circle"):
        read(tmp_path, "defaults: [other]\n")


def test_references(tmp_path: Path) -> None:
    text = """\
n: 4
text: run-${n}
same: ${n}
section:
  x: 1
  y: ${.x}
  z: ${..n}
copy: ${section}
half: ${int_div:${n},2}
unset: ${oc.env:HOME,/nowhere}
other: ${oc.select:nothing,7}
on: true
off: ${not:${on}}
off_too: ${not:on}
"""
    values = flat(read(tmp_path, text))
    assert values["text"] == "run-4"
    assert values["same"] == 4
    assert (values["section.y"], values["section.z"], values["copy.x"]) == (1, 4, 1)
    assert (values["off"], values["off_too"]) == (False, False)
    assert (values["half"], values["unset"], values["other"]) == (2, "/nowhere", 7)


def test_values_in_a_circle_are_one_clear_error(tmp_path: Path) -> None:
    found = problems(read(tmp_path, "a: ${b}\nb: ${c}\nc: ${a}\n"))
    assert "`a` values refer to each other in a circle: a -> b -> c -> a" in found[0]


def test_an_anchor_in_a_circle_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="contains an alias to itself"):
        read(tmp_path, "a: &x\n  b: *x\n")


def test_a_reference_to_nothing_is_an_error(tmp_path: Path) -> None:
    assert "refers to a key that is not there" in problems(read(tmp_path, "a: ${nothing.here}\n"))[0]


@pytest.mark.parametrize(
    "value", ["${eval:'1+1'}", "${python:os.system}", "${oc.env:WHO}", "${divide:1,0}", "${multiply:1e308,1e308}"]
)
def test_resolvers_run_nothing(tmp_path: Path, value: str) -> None:
    assert len(problems(read(tmp_path, f'a: "{value}"\n'))) == 1


def test_a_bomb_of_references_is_refused(tmp_path: Path) -> None:
    lines = ["a0: xxxxxxxxxx", *(f'a{n}: "${{a{n - 1}}}${{a{n - 1}}}"' for n in range(1, 40))]
    assert "too many references" in "".join(problems(read(tmp_path, "\n".join(lines))))


def test_a_long_chain_of_references_is_refused(tmp_path: Path) -> None:
    lines = ["a0: 1", *(f"a{n}: ${{a{n - 1}}}" for n in range(1, 1000))]
    assert "too deeply" in problems(read(tmp_path, "\n".join(reversed(lines))))[0]


def test_a_bomb_of_aliases_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    with pytest.raises(RecipeError, match="aliases make more than"):
        read(tmp_path, "\n".join(lines))


def test_a_bomb_of_files_is_refused(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"a{number}.yaml").write_text(f"defaults: [a{number + 1}, a{number + 1}]\n")
    with pytest.raises(RecipeError, match="more than 100 files"):
        read(tmp_path, "defaults: [a0]\n")


def test_files_elsewhere_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "configs" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / "secrets.yaml").write_text("token: 1\n")
    config = read(folder, f"defaults: [../../secrets, {tmp_path}/secrets]\na: 1\n")
    assert flat(config) == {"a": 1}
    assert config.missing == ["../../secrets", f"{tmp_path}/secrets"]


def test_a_group_lies_below_its_name_unless_it_says_where(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("layers: 2\n")
    (tmp_path / "model" / "large.yaml").write_text("# @package _global_\nlayers: 8\n")
    assert flat(read(tmp_path, "defaults:\n  - model: small\n")) == {"model.layers": 2}
    assert flat(read(tmp_path, "defaults:\n  - model@_global_: small\n")) == {"layers": 2}
    assert flat(read(tmp_path, "defaults:\n  - model: large\n")) == {"layers": 8}
    assert flat(read(tmp_path, "defaults:\n  - model: large\n  - override model: small\n")) == {"model.layers": 2}


def test_a_file_is_under_those_that_come_behind_self(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 1\n")
    assert flat(read(tmp_path, "defaults: [_self_, base]\nseed: 2\n")) == {"seed": 1}
    assert flat(read(tmp_path, "defaults: [base, _self_]\nseed: 2\n")) == {"seed": 2}


def test_words_for_true_and_false(tmp_path: Path) -> None:
    assert flat(read(tmp_path, "a: no\nb: On\nc: 'no'\n")) == {"a": False, "b": True, "c": "no"}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("{a:eager,b:0}", {"a": "eager", "b": 0}),
        ("{a: [1,'x y'], b: {c: null}}", {"a": [1, "x y"], "b": {"c": None}}),
        ("[${a.b},1]", ["${a.b}", 1]),
        ("[]", []),
        ("a\\,b", "a,b"),
        ("x #y", "x #y"),
        ("&x", "&x"),
        ("a: b", "a: b"),
        ("'it\\'s'", "it's"),
        ("http://x:1/y", "http://x:1/y"),
    ],
)
def test_values_are_read_as_hydra_reads_them(written: str, value: Any) -> None:
    assert read_value(written) == value


@pytest.mark.parametrize("written", ["[1,2", "{a:1", "[1]x", "{a}", "'a", "[" * 100 + "]" * 100])
def test_values_that_are_left_open_are_refused(written: str) -> None:
    with pytest.raises(RecipeError):
        read_value(written)
