"""`import corral`: the same runs as on the command line, with objects where a recipe has names."""

import asyncio
import concurrent.futures
import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from commands import corral as command_line
from deadlines import within
from response_length import length
from runs import write_recipe

import corral
from corral.api import _outside_of_event_loops
from corral.observe.run_folder import RunFolder

ROWS = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(8)]


def recipe(folder: Path, model: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"chat": False, "max_prompt_tokens": 16},
        "rollout": {"max_response_tokens": 4},
        "batch": {"prompts_per_step": 2, "samples_per_prompt": 2},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"steps": 2},
        "logging": {"runs": str(folder / "runs"), "curve": False},
        **more,
    }


def without_times(run: corral.Run) -> list[dict[str, Any]]:
    rows = run.metrics.to_pylist()
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "speed/", "memory/"))} for row in rows
    ]


def test_a_run_has_metrics_a_checkpoint_and_trajectories(tmp_path: Path, tiny_model: Path) -> None:
    run = corral.train(recipe(tmp_path, tiny_model), reward=length, data=ROWS, quiet=True)
    assert run.metrics["step"].to_pylist() == [1, 2]
    assert run.checkpoint == tmp_path / "runs" / "tiny" / "checkpoints" / "step_000002"
    records = run.trajectories()
    assert len(records) == 4
    assert {record["reward"] for record in records} <= {0.0, 1.0, 2.0}
    mean = sum(record["reward"] for record in records) / len(records)
    assert run.metrics["reward/mean"].to_pylist()[-1] == pytest.approx(mean)
    assert corral.Run(run.folder).recipe.schedule.steps == 2
    assert run.finished
    shown = run._repr_html_()
    assert f"{run.folder}: finished" in shown
    assert '<progress value="2" max="2"' in shown
    assert "<polyline" in shown


def test_the_recipe_of_a_run_is_the_one_it_was_last_started_with(tmp_path: Path, tiny_model: Path) -> None:
    data = {"train": {"path": "arithmetic:addition"}}
    for name, steps in (("recipe.yaml", 2), ("recipe.2.yaml", 5)):
        (tmp_path / name).write_text(json.dumps(recipe(tmp_path, tiny_model, data=data, schedule={"steps": steps})))
    assert corral.Run(tmp_path).recipe.schedule.steps == 5


@pytest.mark.slow
def test_it_is_the_run_of_the_command_line(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "score.py").write_text("def length(response):\n    return len(response) % 3\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values = recipe(tmp_path, tiny_model, name="shell", environment={"reward": {"name": "score.py:length"}})
    values["data"] = {**values["data"], "train": {"path": "rows.jsonl"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    result = command_line(tmp_path, "train", "recipe.yaml")
    assert result.code == 0, result.stderr
    shell = corral.Run(tmp_path / "runs" / "shell")
    python = corral.train(recipe(tmp_path, tiny_model), reward=length, data=ROWS, quiet=True)
    assert without_times(shell) == without_times(python)


def test_a_lambda_and_a_closure_are_rewards(tmp_path: Path, tiny_model: Path) -> None:
    divisor = 2
    run = corral.train(
        recipe(tmp_path, tiny_model), reward=lambda response: len(response) % divisor, data=ROWS, quiet=True
    )
    assert all(record["reward"] in (0.0, 1.0) for record in run.trajectories())
    assert run.metrics["samples/errors"].to_pylist() == [0, 0]


def test_a_lambda_for_the_reward_and_another_for_the_loss_are_two_objects(tmp_path: Path, tiny_model: Path) -> None:
    run = corral.train(
        recipe(tmp_path, tiny_model),
        reward=lambda response: len(response) % 2,
        loss=lambda terms: -terms.advantages * terms.logprobs,
        data=ROWS,
        quiet=True,
    )
    assert run.metrics["samples/errors"].to_pylist() == [0, 0]


def test_a_list_of_rewards_is_their_weighted_sum_and_one_may_be_for_trl(tmp_path: Path, tiny_model: Path) -> None:
    def lengths(completions: list[str], prompts: list[str], solution: list[int], **columns: Any) -> list[float]:
        assert [f"{number} + 1 =" for number in solution] == prompts
        return [float(length(one)) for one in completions]

    values = recipe(tmp_path, tiny_model, environment={"reward": {"name": "math", "options": {"right": 2}}})
    rows = [{"prompt": f"{number} + 1 =", "solution": number} for number in range(8)]
    run = corral.train(values, reward=[lengths, (length, 0.5), (lambda response: 1.0, 2)], data=rows, quiet=True)
    for record in run.trajectories():
        parts = record["rewards"]
        assert parts == {"lengths": parts["length"], "length": parts["length"], "reward_3": 1.0}
        assert record["reward"] == 1.5 * parts["length"] + 2
    assert run.metrics["samples/errors"].to_pylist() == [0, 0]


class Echo(corral.Env):
    async def reset(self, row: Any, seed: int) -> Any:
        return row.prompt

    async def step(self, reply: str) -> corral.StepResult:
        return corral.StepResult([], float(len(reply)), done=True)


class BlockingEcho(corral.BlockingEnv):
    def reset(self, row: Any, seed: int) -> Any:
        return row.prompt

    def step(self, reply: str) -> corral.StepResult:
        return corral.StepResult([], float(len(reply)), done=True)


@pytest.mark.slow
@pytest.mark.parametrize("environment", [Echo, BlockingEcho])
def test_a_class_is_an_environment(tmp_path: Path, tiny_model: Path, environment: type) -> None:
    run = corral.train(recipe(tmp_path, tiny_model), environment=environment, data=ROWS, quiet=True)
    assert any(record["reward"] > 0 for record in run.trajectories())
    assert run.metrics["samples/errors"].to_pylist() == [0, 0]


def test_the_package_knows_its_version() -> None:
    assert corral.__version__.count(".") == 2


def test_sections_and_dotted_keys_change_a_recipe(tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe(tmp_path, tiny_model, data={"train": {"path": "arithmetic:addition"}})))
    loaded = corral.load_recipe(path, schedule={"steps": 7}, **{"batch.prompts_per_step": 3})
    assert (loaded.schedule.steps, loaded.batch.prompts_per_step) == (7, 3)
    assert corral.load_recipe(loaded, seed=5).seed == 5
    assert corral.plan(loaded).num_steps == 7


def test_keys_of_the_users_own_keep_their_dots(tmp_path: Path, tiny_model: Path) -> None:
    train = {"path": "arithmetic:addition", "filters": {"level": [1, 2]}}
    filters = {"extra_info.pass_rate": [0.1, 0.9]}
    loaded = corral.load_recipe(
        recipe(tmp_path, tiny_model, data={"train": train}), data={"train": {"filters": filters}}
    )
    assert loaded.data.train.filters == {"level": (1, 2), "extra_info.pass_rate": (0.1, 0.9)}


def test_a_recipe_that_was_loaded_loads_as_the_same(tmp_path: Path, tiny_model: Path) -> None:
    data = {"train": {"path": "rows.jsonl"}, "system": "write $${x} and $$${y}"}
    loaded = corral.load_recipe(recipe(tmp_path, tiny_model), data=data)
    assert loaded.data.system == "write ${x} and $${y}"
    assert corral.load_recipe(loaded) == loaded


def test_what_is_wrong_is_an_error_with_a_line_for_each_problem(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(corral.RecipeError) as error:
        corral.load_recipe(recipe(tmp_path, tiny_model), nonsense=1, schedule={"steps": 0})
    assert "nonsense" in str(error.value)
    assert "schedule.steps" in str(error.value)
    for function in (lambda text: 0.0, functools.partial(lambda text: 0.0)):
        with pytest.raises(corral.UserError, match="must have a parameter `response`"):
            corral.reward(function)
    for nothing in (None, [1]):
        with pytest.raises(corral.UserError, match="a recipe is a path, nested mappings or a loaded recipe, not a"):
            corral.load_recipe(nothing)  # type: ignore[arg-type]
    for wrong in (length, [length, length]):
        with pytest.raises(corral.UserError, match=r"rewards: functions and classes are .*; did you mean `reward`"):
            corral.train({}, rewards=wrong)
    with pytest.raises(corral.UserError, match="is not the folder of a run"):
        corral.Run(tmp_path)


def test_it_works_where_an_event_loop_runs_already(tmp_path: Path, tiny_model: Path) -> None:
    async def cell() -> corral.Run:
        return corral.train(recipe(tmp_path, tiny_model), reward=length, data=ROWS, quiet=True)

    assert asyncio.run(cell()).metrics.num_rows == 2


@pytest.mark.parametrize("can_ask", [True, False])
def test_ctrl_c_in_a_notebook_asks_and_the_next_one_ends_it_at_once(can_ask: bool) -> None:
    begun, asked, ended, left = (threading.Event() for _ in range(4))

    def work() -> None:
        try:
            begun.set()
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    def ask() -> bool:
        asked.set()
        return True

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Only while the notebook waits: a key that is pressed later would interrupt the test itself."""
        while frame is not None and frame.f_code is not concurrent.futures.wait.__code__:
            frame = frame.f_back
        if frame is not None:
            raise KeyboardInterrupt

    def press() -> None:
        begun.wait(within(10))
        while not left.wait(0.05):
            os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> None:
        _outside_of_event_loops(work, ask if can_ask else None)

    before, keys = signal.signal(signal.SIGINT, interrupt), threading.Thread(target=press)
    keys.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.new_event_loop().run_until_complete(cell())
    finally:
        left.set()
        keys.join()
        signal.signal(signal.SIGINT, before)
    assert ended.wait(within(10))
    assert asked.is_set() == can_ask


@pytest.mark.parametrize("in_notebook", [True, False])
def test_ctrl_c_is_raised_when_the_run_has_saved_what_it_has(
    tmp_path: Path, tiny_model: Path, in_notebook: bool
) -> None:
    """As on the command line, so that what follows is not done with a model that is not trained to its end."""
    values = recipe(tmp_path, tiny_model, schedule={"steps": 10_000})
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"

    def press() -> None:
        while not metrics.exists() or not metrics.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> None:
        corral.train(values, reward=length, data=ROWS, quiet=True)

    call = asyncio.new_event_loop().run_until_complete if in_notebook else lambda cell: cell.send(None)
    threading.Thread(target=press).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(cell())
    finally:
        signal.signal(signal.SIGINT, before)
    run = corral.Run(tmp_path / "runs" / "tiny")
    assert not run.finished
    assert run.checkpoint == run.folder / "checkpoints" / f"step_{run.metrics.num_rows:06d}"
    assert "stopped" in run._repr_html_()
    assert "Traceback" not in (run.folder / "logs" / "main.log").read_text()


def test_ctrl_c_in_a_notebook_ends_a_run_that_is_being_prepared(tmp_path: Path, tiny_model: Path) -> None:
    begun = threading.Event()

    def rows() -> Any:
        begun.set()
        while True:
            time.sleep(0.01)
            yield ROWS[0]

    def press() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    async def cell() -> None:
        corral.train(recipe(tmp_path, tiny_model), reward=length, data=rows(), quiet=True)

    threading.Thread(target=press).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.new_event_loop().run_until_complete(cell())
    finally:
        signal.signal(signal.SIGINT, before)
    with RunFolder.open(tmp_path / "runs", "tiny", "auto") as folder:  # it is free again
        assert not folder.holds_run


def test_a_cluster_takes_only_what_it_can_import(tmp_path: Path, tiny_model: Path) -> None:
    values = recipe(tmp_path, tiny_model, cluster={"devices_per_node": 2})
    for reward in (lambda response: 0.0, [length, (lambda response: 0.0, 2.0)]):
        with pytest.raises(corral.UserError, match="cannot be imported by the workers of a cluster"):
            corral.train(values, reward=reward, data=ROWS)


@pytest.mark.slow
def test_a_program_of_its_own_defines_everything_in_one_file(tmp_path: Path, tiny_model: Path) -> None:
    """What `__main__` defines is not imported again by the processes that run it: that would start another run."""
    values = recipe(tmp_path, tiny_model)
    (tmp_path / "program.py").write_text(
        textwrap.dedent(f"""
        import corral
        def score(response):
            return len(response) % 2
        run = corral.train({values!r}, reward=score, data={ROWS!r}, quiet=True)
        print(run.metrics.num_rows)
        """)
    )
    result = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=within(120), check=False
    )
    assert result.stdout.split() == ["2"], result.stderr


def test_importing_corral_imports_no_torch() -> None:
    program = "import corral, sys; corral.Env; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


@pytest.mark.slow
def test_a_checkpoint_is_evaluated(tmp_path: Path, tiny_model: Path) -> None:
    values = recipe(tmp_path, tiny_model)
    run = corral.train(values, reward=length, data=ROWS, quiet=True)
    rows = [{"prompt": "1 + 1 =", "answer": "2"}]
    values["data"] = {**values["data"], "train": {"path": "arithmetic:addition"}}
    metrics = corral.evaluate(values, run.checkpoint, reward=length, validation=rows)
    assert metrics["validation/mean@1"] in (0.0, 1.0, 2.0)
    of_run = corral.evaluate(values, run.folder, reward=length, validation=rows)
    assert of_run["validation/mean@1"] == metrics["validation/mean@1"]


@pytest.mark.slow
def test_a_run_that_was_trained_with_another_reward_is_refused_unless_one_insists(
    tmp_path: Path, tiny_model: Path
) -> None:
    recipe = write_recipe(tmp_path, tiny_model)

    def by_length(response: str) -> float:
        return len(response) / 8

    corral.train(recipe, reward=by_length, schedule={"steps": 1}, quiet=True)

    def by_length(response: str) -> float:  # type: ignore[no-redef]
        return len(set(response)) / 8

    with pytest.raises(
        corral.UserError, match=r"environment.reward.name: the content of corral_objects:reward_by_length"
    ):
        corral.train(recipe, reward=by_length, schedule={"steps": 2}, quiet=True)
    run = corral.train(recipe, reward=by_length, schedule={"steps": 2}, quiet=True, resume_anyway=True)
    assert run.metrics["step"].to_pylist() == [1, 2]


def test_warnings_of_a_quiet_run_go_to_stderr(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, tiny_model)

    def broken(response: str) -> float:
        raise KeyError("no such thing")

    with pytest.raises(corral.RunError, match="all 16 samples failed, 16 of them with: KeyError: 'no such thing'"):
        corral.train(recipe, reward=broken, quiet=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("warning: a sample failed: KeyError: 'no such thing' (test_python_api.py:") == 1
