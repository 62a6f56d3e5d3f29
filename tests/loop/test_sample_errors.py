"""A reward, environment, tool or agent that is broken is reported at once, with its place, and ends the run."""

import asyncio
import io
import re
from pathlib import Path

import pytest
from commands import corral, start_corral
from deadlines import within
from runs import VALIDATION, steps_of, write_recipe
from trajectories import make_trajectory

from corral.data.plugins import error_line
from corral.data.rows import Row
from corral.loop.sample_errors import MAX_KINDS, ErrorCounts, ErrorReport, TooManyErrors
from corral.loop.train import running, train
from corral.loop.training_loop import Interrupt, run_steps
from corral.observe.console import Console, step_line, validation_line
from corral.observe.run_folder import RunFolder
from corral.observe.trajectory_store import TrajectoryStore
from corral.recipe.errors import RunError
from corral.recipe.load import load_recipe
from corral.recipe.plan import make_plan
from corral.recipe.schema import Environment
from corral.rewards.reward_function import call_with, is_group_function, load_function
from corral.training.checkpoint import step_folder

BROKEN = """\
import asyncio, itertools, json, pathlib
import corral
from corral.envs.built_in.tools import ToolsEnv
calls = itertools.count()  # the first one is made before the model is loaded, with the answer for a reply, and is well

def name_error(response):
    return 0 if response.isdigit() else len(respose)  # line 7

async def async_name_error(response):
    await asyncio.sleep(0)
    return 0 if response.isdigit() else len(respose)  # line 11

def group_name_error(responses):
    return [0 if one.isdigit() else len(respose) for one in responses]  # line 14

def in_a_library(response):
    return json.loads("no JSON")["score"]  # line 17

def wrong_type(response):  # line 19
    return "very good"

def no_score(response):  # line 22
    return {"points": 1.0}

def wrong_number(responses):  # line 25
    return [0.5]

def not_finite(response):  # line 28
    return float("nan")

def dies(response):  # line 31
    import os
    os._exit(3)

def good(response):
    return sum(letter in "aeiou" for letter in response) / 8

def fails_from(response, calls, first):
    with open(calls, "a") as file:
        file.write(".")
    if pathlib.Path(calls).stat().st_size >= first:
        raise ConnectionError("the judge is down")  # line 42
    return good(response)

class BadStep(corral.Env):
    async def reset(self, row, seed):
        return row.prompt
    async def step(self, reply):  # line 48
        return 1.0

class LateStep(BadStep):
    async def step(self, reply):  # line 52
        await asyncio.sleep(600)

def agent(row, base_url, api_key):
    return 0.5 if is_first() and ask(row, base_url, api_key) else {}["no such row"]  # line 56

def tool_with_a_typo(text: str) -> str:
    return text if text == "0" else txt.upper()  # line 59

def picky_tool(text: str) -> str:
    raise ValueError("not this text")  # line 62

class CallsAlways(ToolsEnv):
    async def step(self, reply):
        if self._turns == 0:
            name = next(iter(self._box.tools))
            call = json.dumps({"name": name, "arguments": {"text": str(next(calls))}})
            reply = "<tool_call>" + call + "</tool_call>"
        return await super().step(reply)

def same_for_all(response):
    return 0.25

def is_first():  # of all processes: every trajectory has one of its own for its agent
    try:
        return open(__file__ + ".asked", "x")
    except FileExistsError:
        return None

def ask(row, base_url, api_key):
    import httpx  # here: a process of the other functions need not wait for it
    body, headers = {"model": "m", "messages": row.prompt}, {"Authorization": f"Bearer {api_key}"}
    return httpx.post(f"{base_url}/chat/completions", headers=headers, json=body, timeout=30)
"""
TOOLS = ("environment.name={file}:CallsAlways", "rollout.max_turns=2", "rollout.max_response_tokens=128")


def broken(folder: Path, *overrides: str) -> tuple[str, ...]:
    (folder / "broken.py").write_text(BROKEN)
    return tuple(override.replace("{file}", str(folder / "broken.py")) for override in overrides)


def rewarded_by(name: str) -> str:
    return f"environment.reward.name={{file}}:{name}"


def printed(folder: Path, model: Path, *overrides: str) -> tuple[str, str]:
    """The error that ended the steps of a run, and what was printed before."""
    recipe = load_recipe(write_recipe(folder, model), broken(folder, *overrides))
    stream = io.StringIO()
    console = Console(stream)

    async def run_here(run_folder: RunFolder, interrupt: Interrupt) -> None:
        async with running(recipe, run_folder, console, interrupt) as run:
            await run_steps(run)

    with (
        RunFolder.open(Path(recipe.logging.runs), recipe.name, "never") as run_folder,
        Interrupt(console.warn) as interrupt,
        pytest.raises(RunError) as raised,
    ):
        asyncio.run(run_here(run_folder, interrupt))
    return str(raised.value), stream.getvalue()


SOON = f"environment.timeout_s={within(0.3):g}"
FAILURES = {
    "reward": ((rewarded_by("name_error"),), "NameError: name 'respose' is not defined", "broken.py:7"),
    "group": ((rewarded_by("group_name_error"),), "NameError: name 'respose' is not defined", "broken.py:14"),
    "dead": ((rewarded_by("dies"),), "the reward function's process died: it ended with exit code 3", "broken.py:31"),
    "environment": (("environment.name={file}:BadStep",), "it returned 1.0, which is not a StepResult", "broken.py:48"),
    "timeout": (
        ("environment.name={file}:LateStep", SOON),
        f"step: no answer within {within(0.3):g} s",
        "broken.py:52",
    ),
    "agent": (
        ("environment.name=agent", "environment.options.agent={file}:agent"),
        "the agent failed: KeyError: 'no such row'",
        "broken.py:56",
    ),
    "tool": (
        (*TOOLS, "environment.options.tools=['{file}:tool_with_a_typo']"),
        "`tool_with_a_typo` failed: NameError: name 'txt' is not defined",
        "broken.py:59",
    ),
}
"""One for each way that an error takes to the console. What else goes wrong in rewards and environments has a text and
a place, too, which their own tests look at."""


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.slow
def test_what_fails_in_every_sample_is_printed_once_with_its_place_and_ends_the_run(
    tmp_path: Path, tiny_model: Path, kind: str
) -> None:
    overrides, error, place = FAILURES[kind]
    message, text = printed(tmp_path, tiny_model, "batch.prompts_per_step=1", *overrides)
    [warning] = [line for line in text.splitlines() if line.startswith("warning: a sample failed")]
    assert error in warning
    assert f"({place}" in warning
    assert message.startswith("step 1: all 4 samples failed, 4 of them with: ")
    assert error in message
    assert "`environment.max_error_rate`, now 0.5" in message


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("{file}:async_name_error", "NameError: name 'respose' is not defined (broken.py:11)"),
        ("{file}:in_a_library", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (broken.py:17)"),
        ("{file}:wrong_type", "the reward must be a number; the function returned 'very good' (broken.py:19)"),
        ("{file}:no_score", "the function returned a dict without `score`: points (broken.py:22)"),
        ("{file}:wrong_number", "a list of 4, one for each response: [0.5] (broken.py:25)"),
        ("{file}:not_finite", "the reward must be finite; the function returned nan (broken.py:28)"),
        ("exact", "the row has no answer to compare with; is data.answer_key set? (scorers.py:"),
    ],
)
def test_the_error_of_a_reward_function_has_the_users_place(tmp_path: Path, name: str, error: str) -> None:
    [name] = broken(tmp_path, name)
    function, row = load_function(name, {}), Row([{"role": "user", "content": "1+1"}], None, "", {})
    with pytest.raises(Exception) as raised:
        call_with(function, ["a"] * 4 if is_group_function(function) else "a", row, {})
    assert error in error_line(raised.value.with_traceback(raised.tb.tb_next))  # without the frame of this test


@pytest.mark.slow
def test_a_tool_that_raises_is_printed_and_the_run_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    """The model may have called it wrongly."""
    overrides = broken(
        tmp_path, *TOOLS, "environment.options.tools=['{file}:picky_tool']", "schedule.steps=1", rewarded_by("good")
    )
    stream = io.StringIO()
    recipe = load_recipe(write_recipe(tmp_path, tiny_model), overrides)
    run = train(recipe, make_plan(recipe), Console(stream))
    [warning] = [line for line in stream.getvalue().splitlines() if line.startswith("warning: a tool failed")]
    assert "`picky_tool` failed: ValueError: not this text (broken.py:62)" in warning
    [step] = steps_of(run)
    assert step["environment/tool_errors"] == 1
    assert step["samples/errors"] == step["samples/error_rate"] == 0


def test_the_command_line_ends_with_one_line_and_code_1_and_keeps_what_was_trained(
    tmp_path: Path, tiny_model: Path
) -> None:
    write_recipe(tmp_path, tiny_model)
    options = (f"environment.reward.options.calls={tmp_path}/calls", "environment.reward.options.first=38")
    command = ("train", "recipe.yaml", *broken(tmp_path, rewarded_by("fails_from")), *options)
    command = (*command, "schedule.steps=9", "logging.trajectories=true")
    finished = corral(tmp_path, *command)
    assert finished.code == 1
    [error] = finished.errors
    assert error.startswith("error: step 3: 12 of 16 samples failed, 12 of them with: ConnectionError: the judge is do")
    assert "(broken.py:42)" in error
    assert "Traceback" not in finished.stderr
    assert finished.stdout.count("a sample failed: ConnectionError: the judge is down (broken.py:42)") == 1
    run = tmp_path / "runs" / "tiny"
    assert step_folder(run / "checkpoints", 2).exists()
    assert [row["step"] for row in steps_of(run)] == [1, 2]
    assert len(re.findall("prompt .*the judge is down", (run / "logs" / "main.log").read_text())) == 12
    store = TrajectoryStore(run / "trajectories")
    samples = store.summaries(3, "failed")
    assert [sum(one["error"] is not None for one in samples), len(samples)] == [12, 16]
    (tmp_path / "calls").write_text("")
    again = corral(tmp_path, *command, "schedule.steps=3")
    assert again.code == 0, again.stderr
    assert "resumed after step 2" in again.stdout
    assert store.parts() == [(1, ""), (2, ""), (3, "")]


def test_the_limit_is_the_recipes(tmp_path: Path, tiny_model: Path) -> None:
    options = (f"environment.reward.options.calls={tmp_path}/calls", "environment.reward.options.first=14")
    message, _ = printed(tmp_path, tiny_model, rewarded_by("fails_from"), *options, "environment.max_error_rate=0.2")
    assert message.startswith("step 1: 4 of 16 samples failed, 4 of them with: ConnectionError")
    message, _ = printed(tmp_path, tiny_model, rewarded_by("name_error"), "environment.max_error_rate=1")
    assert message.startswith("step 1: all 16 samples failed")


def test_with_dynamic_sampling_a_broken_reward_is_not_taken_for_equal_rewards(tmp_path: Path, tiny_model: Path) -> None:
    message, _ = printed(tmp_path, tiny_model, rewarded_by("name_error"), "algorithm.name=dapo")
    assert message.startswith("step 1: all 16 samples failed, 16 of them with: NameError")


@pytest.mark.parametrize("on_error", ["0", "drop"])
def test_a_validation_in_which_everything_fails_ends_the_run(tmp_path: Path, tiny_model: Path, on_error: str) -> None:
    message, text = printed(
        tmp_path, tiny_model, rewarded_by("name_error"), *VALIDATION, f"environment.reward.on_error={on_error}"
    )
    assert "6 of them with: NameError: name 'respose' is not defined (broken.py:7)" in message
    assert message.startswith("validation")
    assert text.count("a sample failed: ") == 1


def test_an_evaluation_in_which_everything_fails_ends_with_code_1(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    finished = corral(tmp_path, "evaluate", "recipe.yaml", *VALIDATION, *broken(tmp_path, rewarded_by("name_error")))
    assert finished.code == 1
    [error] = finished.errors
    assert error.startswith("error: evaluation: all 6 samples failed, 6 of them with: NameError")
    assert "100.0 % of the samples failed" in finished.stdout
    assert finished.stdout.count("warning: a sample failed: NameError") == 1


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_it_is_the_same_on_ray_workers(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    cluster = ("cluster.runtime=ray", "cluster.devices_per_node=2", "cluster.placement={rollout: 0, actor: 1}")
    overrides = broken(tmp_path, rewarded_by("name_error"))
    finished = start_corral(tmp_path, "train", "recipe.yaml", *cluster, *overrides).wait(240)
    assert finished.code == 1
    [error] = finished.errors
    assert "step 1: all 16 samples failed, 16 of them with: NameError: name 'respose' is not defined" in error
    assert finished.stdout.count("a sample failed: NameError: name 'respose' is not defined (broken.py:7)") == 1


def test_steps_without_anything_to_train_on_are_reported(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(
        write_recipe(tmp_path, tiny_model), broken(tmp_path, rewarded_by("same_for_all"), "schedule.steps=4")
    )
    run = train(recipe, make_plan(recipe), Console(io.StringIO()))
    assert [row["updates/made"] for row in steps_of(run)] == [0, 0, 0, 0]
    [warning] = [record.getMessage() for record in caplog.records if "nothing to train on" in record.getMessage()]
    assert warning.startswith("step 3: in 3 steps in a row no sample was better or worse than the others")
    assert "rewards of this step: all of them 0.25" in warning


def test_kinds_differ_by_exception_and_place_and_not_by_what_the_sample_was() -> None:
    warnings: list[str] = []
    report = ErrorReport(warnings.append)
    trajectories = [make_trajectory([1], [2]) for _ in range(4)]
    trajectories[0].error = "ValueError: invalid literal for int(): 'a' (r.py:3)"
    trajectories[1].error = "ValueError: invalid literal for int(): 'b' (r.py:3)"
    trajectories[2].error = "KeyError: 'b' (r.py:3)"
    trajectories[3].error = "ValueError: invalid literal for int(): 'b' (r.py:4)"
    report.see(trajectories)
    assert len(warnings) == 3
    for number in range(50):
        trajectories[0].error = f"ValueError: no (r.py:{number + 10})"
        report.see(trajectories[:1])
    assert len(warnings) == MAX_KINDS + 1
    assert "only in logs/main.log" in warnings[-1]


def test_each_of_several_environments_has_its_own_limit() -> None:
    trajectories = [make_trajectory([1], [2]) for _ in range(12)]
    for place, one in enumerate(trajectories):
        one.tag = "lake" if place < 4 else "maze"
        one.error = "OSError: gone (maze.py:3)" if place in (4, 5, 6) else None
    counts = ErrorCounts.join([ErrorCounts.of(trajectories[:5]), ErrorCounts.of(trajectories[5:])])
    assert counts.rate == 3 / 12
    counts.check("step 2", {"lake": Environment(max_error_rate=0.1), "maze": Environment()}, is_first=False)
    counts.check("step 2", {"lake": Environment(), "maze": Environment(max_error_rate=None)}, is_first=False)
    with pytest.raises(TooManyErrors, match=r"step 2: 3 of 8 samples of environments.maze failed, 3 of them with: OSE"):
        counts.check("step 2", {"lake": Environment(), "maze": Environment(max_error_rate=0.1)}, is_first=False)


def test_lines_show_the_share_that_failed() -> None:
    assert step_line(1, 2, {"reward/mean": 0.1, "samples/error_rate": 0.25}, set(), None).plain.endswith("failed 25%")
    assert "failed" not in step_line(1, 2, {"reward/mean": 0.1, "samples/error_rate": 0.0}, set(), None).plain
    line = validation_line("after step 1", {"validation/mean@1": 0.5, "validation/error_rate": 0.125}, 8)
    assert line.endswith("(8 questions), 12.5 % of the samples failed")
