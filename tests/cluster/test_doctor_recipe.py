"""What the doctor says of a recipe: its rules, memory, files, chat template, prompts and reward."""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import typer
from runs import write_recipe
from tiny import TEMPLATE, tiny_tokenizer

from corral.cli.cluster_commands import doctor
from corral.cluster.doctor.file_checks import RequiredFile, check_required, digest_of, required_files
from corral.cluster.doctor.findings import Diagnosis, Finding, NodeRef
from corral.cluster.doctor.recipe_checks import (
    NodeCapacity,
    RewardCall,
    RewardTrial,
    check_chat,
    check_devices,
    check_fit,
    check_prompts,
    check_reward,
    checkpoint_bytes,
    read_recipe,
    try_reward,
)
from corral.data.rows import Message, Row
from corral.recipe.load import load_recipe
from corral.recipe.plan import Plan
from corral.rollout.chat_rendering import THOUGHTS, TURNS, find_breaks

H1, H2, H3 = (NodeRef(f"h{number}", f"10.0.0.{number}", number - 1) for number in (1, 2, 3))
THINKING = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] if loop.last else message['content'].split('</think>')[-1].strip() }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Drops what was thought before, as many do."""
COUNTING = "{{ messages | length }}" + TEMPLATE
"""Changes its beginning with every message."""


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    return write_recipe(tmp_path, tiny_model)


def plan_of(recipe: Path, *overrides: str) -> Plan:
    plan, findings = read_recipe(recipe, overrides, has_gpus=False)
    assert plan is not None, findings
    return plan


# --- rules, memory, devices


def test_each_problem_of_a_recipe_is_an_error(recipe: Path) -> None:
    plan, findings = read_recipe(recipe, ["algorithm.name=grpoo"], has_gpus=False)
    assert plan is None
    assert [finding.level for finding in findings] == ["error"]
    assert "did you mean" in findings[0].what


def test_what_a_recipe_should_think_twice_about_is_a_warning(recipe: Path) -> None:
    _, findings = read_recipe(recipe, [], has_gpus=False)
    assert [finding.level for finding in findings] == ["warning"]
    assert "learning_rate" in findings[0].what


def test_a_mesh_that_training_refuses_is_an_error(recipe: Path) -> None:
    general = ["model.implementation=general", "train.parallel.tensor=2", "cluster.devices_per_node=2"]
    plan, findings = read_recipe(recipe, general, has_gpus=False)
    assert plan is None
    assert [finding.level for finding in findings] == ["error"]
    assert "train.parallel.tensor" in findings[0].what


CLUSTER = ("cluster.nodes=2", "cluster.devices_per_node=2")


def test_memory_is_compared_with_each_nodes_own(recipe: Path) -> None:
    plan = plan_of(recipe, *CLUSTER)
    needs = max(plan.memory[0].totals.values())
    large, tight, small = (NodeCapacity(2, (size, size), 2**40) for size in (10 * needs, int(1.05 * needs), needs // 2))
    assert [one.level for one in check_fit(plan, {H1: large, H2: large})] == ["ok"]
    found = list(check_fit(plan, {H1: tight, H2: small}))
    assert [(one.level, one.nodes, one.device) for one in found] == [
        ("warning", (H1,), "GPU 0"),
        ("warning", (H1,), "GPU 1"),
        ("error", (H2,), "GPU 0"),
        ("error", (H2,), "GPU 1"),
    ]
    without = list(check_fit(plan, {H1: NodeCapacity(2, (), 10 * needs), H2: NodeCapacity(2, (), needs)}))
    assert [(one.level, one.nodes, one.device) for one in without] == [("error", (H2,), None)]


def test_checkpoints_need_room_for_those_that_are_kept_and_the_next(recipe: Path) -> None:
    plan = plan_of(recipe)
    assert plan.shape is not None
    assert checkpoint_bytes(plan) == plan.shape.num_parameters * (4 + 8) * 3


def test_a_cluster_that_is_too_small_is_an_error_with_what_there_is(recipe: Path) -> None:
    asked = load_recipe(recipe, CLUSTER)
    two, one = NodeCapacity(2, (), 0), NodeCapacity(1, (), 0)
    assert [found.level for found in check_devices(asked, {H1: two, H2: two, H3: one})] == ["ok"]
    [found] = check_devices(asked, {H1: two, H2: one})
    assert found.level == "error"
    assert "2 on h1, 1 on h2" in found.what


# --- files


def test_what_a_recipe_names_is_found(recipe: Path, tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    named = required_files(load_recipe(recipe, [f"data.train.path={rows}", "data.train.size=null", *CLUSTER]), recipe)
    assert [(one.key, one.name, one.everywhere) for one in named] == [
        ("recipe", str(recipe), True),
        ("model.path", str(tiny_model), True),
        ("environment.reward.name", str(tmp_path / "vowels.py"), True),
        ("data.train.path", str(rows), False),
    ]
    assert [bool(digest_of(one)) for one in named] == [True, True, True, False]
    assert not required_files(load_recipe(recipe), recipe)[1].everywhere


def test_losses_and_advantages_of_the_users_are_looked_for(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def loss(terms): ...\ndef advantage(batch): ...\n")
    own = [f"algorithm.{kind}={tmp_path}/own.py:{kind}" for kind in ("loss", "advantage")]
    named = {one.key: one for one in required_files(load_recipe(recipe, own), recipe)}
    for key in ("algorithm.loss.name", "algorithm.advantage.name"):
        assert named[key].name == str(tmp_path / "own.py")
        assert digest_of(named[key])


@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "blank-1m", "Blank-Vision-1m"])
def test_built_in_models_and_boards_are_no_files_of_the_users(recipe: Path, model: str) -> None:
    built_in = load_recipe(recipe, ["data.train.path=boards", "~data.train.options", f"model.path={model}"])
    found = {one.key: one for one in required_files(built_in, recipe)}
    assert "data.train.path" not in found
    [finding] = check_required(found["model.path"], {H1: ""}, H1, offline=True)
    assert finding.level == "note"


def test_modules_and_models_of_the_hub_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    hub = RequiredFile("model.path", "org/model", "hub", True)
    assert digest_of(hub) == ""
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text("abc")
    assert digest_of(hub)
    assert digest_of(RequiredFile("environment.name", "corral.envs.built_in.question", "module", True))
    assert not digest_of(RequiredFile("environment.name", "no.such.module", "module", True))


CODE = RequiredFile("environment.reward.name", "/code/reward.py", "path", True)


def test_a_file_that_a_node_lacks_or_has_another_version_of_is_named() -> None:
    [lacks] = check_required(CODE, {H1: "a", H2: "", H3: "a"}, H1, offline=False)
    assert (lacks.level, lacks.nodes) == ("error", (H2,))
    [differs] = check_required(CODE, {H1: "a", H2: "a", H3: "b"}, H1, offline=False)
    assert (differs.level, differs.nodes) == ("error", (H3,))
    [wrong] = check_required(CODE, {H1: "", H2: "", H3: ""}, H1, offline=False)
    assert (wrong.level, wrong.nodes) == ("error", (H1,))
    assert list(check_required(CODE, {H1: "a", H2: "a"}, H1, offline=False)) == []


def test_a_recipe_may_be_missing_elsewhere_but_not_differ() -> None:
    own = RequiredFile("recipe", "/r.yaml", "recipe", True)
    assert list(check_required(own, {H1: "a", H2: ""}, H1, offline=False)) == []
    [differs] = check_required(own, {H1: "a", H2: "b"}, H1, offline=False)
    assert (differs.level, differs.nodes) == ("warning", (H2,))


def test_a_model_of_the_hub_is_an_error_only_without_the_hub() -> None:
    hub = RequiredFile("model.path", "org/model", "hub", True)
    assert [one.level for one in check_required(hub, {H1: "a", H2: ""}, H1, offline=False)] == ["note"]
    assert [one.level for one in check_required(hub, {H1: "a", H2: ""}, H1, offline=True)] == ["error"]


# --- chat


def tokenizer_with(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_that_only_appends_has_no_breaks() -> None:
    tokenizer = tiny_tokenizer()
    assert list(find_breaks(tokenizer, TURNS)) == []
    assert list(find_breaks(tokenizer, THOUGHTS)) == []


def test_the_first_token_that_changes_is_shown() -> None:
    [found] = find_breaks(tokenizer_with(THINKING), THOUGHTS)
    assert (found.num_messages, found.generation_prompt) == (2, False)
    assert "<" in found.before
    assert "It" in found.after
    assert f"token {found.token} was" in str(found)
    start = tokenizer_with(THINKING).apply_chat_template(THOUGHTS[:2], return_dict=False)
    assert tiny_tokenizer().decode(start[found.token]) == "<"


@pytest.mark.parametrize(
    ("template", "turns", "levels"),
    [
        (TEMPLATE, 1, ["ok"]),
        (TEMPLATE, 3, ["ok"]),
        (THINKING, 1, ["note"]),
        (THINKING, 3, ["warning"]),
        (COUNTING, 1, ["note"]),
        (COUNTING, 3, ["warning"]),
        ("{{ raise_exception('no') }}", 1, ["note"]),
        ("", 1, ["error"]),
    ],
)
def test_a_template_matters_as_much_as_the_recipe_has_turns(
    recipe: Path, template: str, turns: int, levels: list[str]
) -> None:
    asked = load_recipe(recipe, [f"rollout.max_turns={turns}"])
    assert [one.level for one in check_chat(tokenizer_with(template), asked)] == levels


def test_prompts_that_are_too_long_are_told_before_the_run(recipe: Path) -> None:
    rows = [Row([Message(role="user", content="x" * length)], "1", "", {}) for length in (5, 80)]
    assert [one.level for one in check_prompts(tiny_tokenizer(), load_recipe(recipe), rows)] == ["error"]
    filtered = load_recipe(recipe, ["data.overlong=filter"])
    assert [one.level for one in check_prompts(tiny_tokenizer(), filtered, rows)] == ["warning"]
    assert [one.level for one in check_prompts(tiny_tokenizer(), filtered, rows[:1])] == ["ok"]


# --- reward

ROWS = [Row([Message(role="user", content="2 + 3")], "5", "", {})] * 2
SCORERS = """
import time
def slow(response): time.sleep(0.6); return 0.0
def hung(response): time.sleep(60)
def fails(response, answer):
    if len(response) > 3: raise ValueError("too long")
    return 1.0
def right(response, answer): return float(response == answer)
"""


@pytest.fixture
def scorer(tmp_path: Path, recipe: Path) -> Callable[..., list[Finding]]:
    def check(name: str, *overrides: str) -> list[Finding]:
        (tmp_path / "scorers.py").write_text(SCORERS)
        plan = plan_of(recipe, f"environment.reward.name={tmp_path}/scorers.py:{name}", *overrides)
        return list(check_reward(try_reward(plan.recipe.environment, ROWS, 8), plan))

    return check


def test_a_good_reward_comes_with_its_time(scorer: Callable[..., list[Finding]]) -> None:
    [found] = scorer("right")
    assert found.level == "ok"
    assert "16 calls a step in 1 process:" in found.what


@pytest.mark.slow
def test_a_reward_that_hangs_or_raises_is_named_with_what_it_said(scorer: Callable[..., list[Finding]]) -> None:
    [hung] = scorer("hung", "environment.reward.timeout_s=0.2")
    assert hung.level == "error"
    assert "took longer than 0.2 s" in hung.what
    [fails] = scorer("fails")
    assert fails.level == "warning"
    assert "in 2 of 4 calls: ValueError: too long" in fails.what
    [unknown] = scorer("unknown")
    assert unknown.level == "error"


@pytest.mark.deadline("a call takes more than half of its limit, and not all of it")
def test_a_reward_near_its_deadline_or_blind_to_the_answer_is_told(scorer: Callable[..., list[Finding]]) -> None:
    found = scorer("slow", "environment.reward.timeout_s=1.1")
    assert [one.level for one in found] == ["warning", "ok", "note"]
    assert "killed after 1.1 s" in found[0].what
    assert "no more (0) than a wrong reply (0)" in found[2].what


def test_a_step_that_waits_for_rewards_is_told(recipe: Path) -> None:
    plan = plan_of(recipe, "batch.prompts_per_step=512", "batch.samples_per_prompt=8")
    calls = (RewardCall(0.5, 1.0, None, True), RewardCall(0.5, 0.0, None, False))
    [found] = check_reward(RewardTrial(calls), plan)
    assert found.level == "warning"
    assert "4096 calls a step" in found.what
    assert "environment.reward.workers" in found.fix


# --- in words


def test_findings_are_grouped_merged_and_aligned() -> None:
    findings = [
        Finding("ok", "memory", "5 GiB", nodes=(H1,)),
        Finding("ok", "memory", "6 GiB", nodes=(H2,)),
        Finding("note", "names", "odd", nodes=(H1,)),
        Finding("note", "names", "odd", nodes=(H2,)),
        Finding("error", "GPU health", "broken", "reset it", (H2,), "GPU 3"),
        Finding("ok", "versions", "torch 1", nodes=(H1, H2)),
    ]
    assert Diagnosis([H1, H2], findings).text().splitlines() == [
        "2 nodes: 0 h1 (10.0.0.1), 1 h2 (10.0.0.2)",
        "",
        "error    GPU health  h2, GPU 3: broken",
        "                     fix: reset it",
        "note     names       all nodes: odd",
        "ok       memory      on all nodes; h1: 5 GiB",
        "ok       versions    torch 1",
        "",
        "1 error, 1 note",
    ]


@pytest.mark.slow
def test_this_node_with_a_recipe(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    with redirect_stdout(said), suppress(typer.Exit):  # of a machine on which something else is wrong
        doctor(recipe, ["cluster.nodes=1"], here=True, as_json=True)
    findings = json.loads(said.getvalue())["findings"]
    checks = {finding["check"]: finding["level"] for finding in findings}
    assert {"torch", "shared memory", "memory", "file limit", "disk", "versions", "recipe"} <= set(checks)
    assert [checks[name] for name in ("files", "chat template", "prompts", "memory fit")] == ["ok"] * 4
    assert not (tmp_path / "runs").exists()
