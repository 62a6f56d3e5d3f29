"""Every way into a debugger of docs/debugging.md that needs one machine only; `corral stacks` has its own tests."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest
from commands import corral
from deadlines import within
from debug_client import DebugClient
from guides import Block, block
from runs import steps_of, write_recipe
from terminal import Terminal

from corral.recipe.errors import UserError
from corral.recipe.load import dump_recipe, load_recipe
from corral.recipe.plan import make_plan
from corral.runtime.local_debugger import in_one_process
from corral.runtime.nodes import Node, NodeFacts
from corral.runtime.remote_debugger import DebuggerOptions, check_debugger

PROMPT = r"\(Pdb\) "
SMALL = ("batch.prompts_per_step=1", "batch.samples_per_prompt=2", "schedule.steps=1", "checkpoint.at_end=false")
REWARDS = """\
import time

calls = []


def stops(response):
    words = ["what", "is", "here"]
    calls.append(response)
    if len(calls) == 1:
        breakpoint()
    return 0.5


def hangs(response):
    bottle = "message"
    print("the reward hangs", flush=True)
    while True:
        time.sleep(0.05)


def raises(response):
    reason = "because"
    raise LookupError("nothing there")
"""
ENVIRONMENTS = """\
from corral.envs.base import StepResult
import corral.loop.train_step
from corral.runtime.model_workers import ActorWorker


class Plain:
    async def reset(self, row, seed):
        return row.prompt

    played = 0

    async def step(self, reply):
        Plain.played += 1
        return StepResult([], Plain.played % 2, done=True)

    async def close(self):
        pass


class Stops(Plain):
    seen = False

    async def step(self, reply):
        inside = "an environment"
        if not Stops.seen:
            Stops.seen = True
            breakpoint()
        return await super().step(reply)


class Breaks(Plain):
    def __init__(self):
        corral.loop.train_step.add_advantages = broken


class BreaksWorker(Stops):
    def __init__(self):
        ActorWorker.accumulate = broken


def broken(*arguments):
    number = 41 + 1
    raise ValueError("no good")
"""


@pytest.fixture
def on_terminal(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Terminal]:
    """The command of a block of the guide, with changes to the recipe."""
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)  # Ray sets it in the process of a test before

    def start(one: Block, *changes: str) -> Terminal:
        prepare(tmp_path, tiny_model, *changes)
        [command] = one.commands
        assert command.startswith("corral ")
        return Terminal(tmp_path, *command.split()[1:])

    return start


def prepare(folder: Path, model: Path, *changes: str) -> None:
    """`recipe.yaml`, and what it names."""
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "environments.py").write_text(ENVIRONMENTS)
    recipe = write_recipe(folder, model)
    recipe.write_text(dump_recipe(load_recipe(recipe, (*SMALL, *changes))))


def test_a_breakpoint_in_a_reward_function_opens_a_debugger(
    tmp_path: Path, on_terminal: Callable[..., Terminal]
) -> None:
    reward = ("environment.reward.name=rewards.py:stops", "environment.reward.timeout_s=0.1")
    cluster = ("cluster.nodes=2", "cluster.placement={rollout: 0, actor: 1}", "schedule.max_staleness=1")
    terminal = on_terminal(block("debug"), *reward, *cluster)
    terminal.expect(PROMPT)
    time.sleep(0.3)  # longer than a reward may take
    terminal.say("p len(words)")
    assert "\r\n3\r\n" in terminal.expect(PROMPT)
    terminal.press_ctrl_c()
    terminal.expect("--KeyboardInterrupt--")
    terminal.expect(PROMPT)
    terminal.say("c")
    code, said = terminal.finish()
    assert code == 0, said
    assert [row["reward/mean"] for row in steps_of(tmp_path / "runs" / "tiny-debug")] == [0.5]


def test_quitting_the_debugger_in_an_environment_ends_the_run(on_terminal: Callable[..., Terminal]) -> None:
    terminal = on_terminal(block("debug"), "environment.name=environments.py:Stops")
    terminal.expect(PROMPT)
    terminal.say("p inside")
    terminal.expect("'an environment'")
    terminal.expect(PROMPT)
    terminal.say("q")
    code, said = terminal.finish()
    assert code == 130
    assert "stopped at once" in said
    assert "Warning" not in said


def test_ctrl_c_opens_the_debugger_where_the_program_is(on_terminal: Callable[..., Terminal]) -> None:
    terminal = on_terminal(block("debug"), "environment.reward.name=rewards.py:hangs")
    terminal.expect("the reward hangs")
    terminal.press_ctrl_c()
    terminal.expect(PROMPT)
    terminal.say("p bottle")
    terminal.expect("'message'")
    terminal.say("q")
    assert terminal.finish()[0] == 130


def test_after_a_failure_the_debugger_opens_where_it_was(on_terminal: Callable[..., Terminal]) -> None:
    terminal = on_terminal(block("post-mortem"), "environment.name=environments.py:Breaks")
    assert "ValueError: no good" in terminal.expect(PROMPT)
    terminal.say("p number")
    terminal.expect("42")
    terminal.expect(PROMPT)
    terminal.say("q")
    code, said = terminal.finish()
    assert code == 1
    assert "ValueError: no good" in said


def test_with_both_it_opens_where_a_reward_function_fails(on_terminal: Callable[..., Terminal]) -> None:
    terminal = on_terminal(block("debug-post-mortem"), "environment.reward.name=rewards.py:raises")
    assert "LookupError: nothing there" in terminal.expect(PROMPT)
    terminal.say("p reason")
    terminal.expect("'because'")
    terminal.expect(PROMPT)
    terminal.say("c")  # with the next sample, which fails too
    terminal.expect(PROMPT)
    terminal.say("q")
    assert terminal.finish()[0] == 130


def test_without_a_terminal_a_failure_is_told_as_ever(tmp_path: Path, tiny_model: Path) -> None:
    prepare(tmp_path, tiny_model, "environment.name=environments.py:Breaks")
    ended = corral(tmp_path, "train", "recipe.yaml", "--post-mortem")
    assert ended.code == 1
    assert "no debugger without a terminal" in ended.stdout
    assert "ValueError: no good" in ended.stderr


def test_what_is_debugged_is_the_same_algorithm_on_one_device(tmp_path: Path, tiny_model: Path) -> None:
    overrides = (
        "cluster.nodes=2",
        "cluster.devices_per_node=3",
        "cluster.placement={rollout: 0-1, actor: 2-3, reward_model: 4-5}",
        "schedule.max_staleness=1",
        "schedule.pipelined=true",
        "train.parallel.shard=2",
        "train.offload=[parameters, gradients, optimizer]",
        "algorithm.correction.cap=3",
        "rollout.engine={name: vllm, tensor_parallel: 2}",
        "environment.reward={name: reward_model}",
        "reward_model={path: classifier, shard: 2}",
        "cluster.services.retriever={retriever: index, port: 8123, devices: 0}",
    )
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), overrides)
    plan = make_plan(in_one_process(recipe))
    assert plan.placement.num_devices == 1
    assert plan.recipe.rollout.engine.tensor_parallel == plan.recipe.reward_model.shard == 1
    assert plan.recipe.cluster.services == recipe.cluster.services
    assert plan.algorithm == make_plan(recipe).algorithm


def test_a_node_without_a_debugger_is_named() -> None:
    node = Node(0, "id", "10.0.0.1", "h1")
    node.facts = NodeFacts("python", "exits.py", 2, None, Path("/tmp"), True, None)
    with pytest.raises(UserError, match=r"h1 \(10.0.0.1\) needs debugpy.*corral\[debug\]"):
        check_debugger(DebuggerOptions(post_mortem=True), [node])


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.xdist_group("debugger")
def test_an_editor_connects_to_workers(tmp_path: Path, tiny_model: Path) -> None:
    """To a breakpoint first, then to the failure that ends the run."""
    prepare(tmp_path, tiny_model, "environment.name=environments.py:BreaksWorker", "cluster.devices_per_node=1")
    command = ["-c", "from corral.cli.main import main; main()", *block("post-mortem").commands[0].split()[1:]]
    environment = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"encoding": "utf-8", "timeout": within(90), "dimensions": (40, 500)}
    run = pexpect.spawn(sys.executable, command, cwd=tmp_path, env=environment, **options)
    run.expect(r"device 0 on .* waits for a debugger at (127.0.0.1:\d+) of that node.*breakpoint\(\) in step")
    with DebugClient(run.match[1]) as editor:
        frame = editor.frames()[0]
        assert frame["name"] == "step"
        assert editor.evaluate("inside", frame["id"]) == "'an environment'"
    run.expect(r"device 0 on .* waits for a debugger at (127.0.0.1:\d+) of that node.*ValueError: no good")
    with DebugClient(run.match[1]) as editor:
        frame = editor.frames()[0]
        assert frame["name"] == "broken"
        assert editor.evaluate("number", frame["id"]) == "42"
    run.expect(r"error: actor.accumulate on device 0 on .*: ValueError: no good")
    run.expect(pexpect.EOF)
    run.close()
    assert run.exitstatus == 1
