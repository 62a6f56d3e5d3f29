"""Several sources with weights, and rows that come earlier, less often or not at all, by how hard they are."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
from runs import RECIPE, same_outcome, steps_of, train_here, write_recipe

from corral.data.sampler import (
    FAILED,
    OUTSIDE,
    SKIP_REASONS,
    SOLVED,
    RewardHistory,
    SampledPrompt,
    SampledSource,
    Sampler,
)
from corral.loop.rollout_step import prompts_of_step
from corral.loop.train import train
from corral.observe.console import Console
from corral.observe.ledger import Ledger
from corral.observe.trajectory_store import read_trajectories
from corral.recipe.load import load_recipe
from corral.recipe.plan import make_plan
from corral.recipe.schema import Curriculum

ONE_SOURCE = '{{path: "arithmetic:addition", size: 40, options: {{digits: 1}}}}'
TWO_SOURCES = """
    sources:
      sums: {{path: "arithmetic:addition", size: 40, options: {{digits: 1}}, weight: 3}}
      products: {{path: "arithmetic:multiplication", size: 2, options: {{digits: 1}}, weight: 1}}"""
FOUR_ROWS = ("data.train.size=4", "batch.prompts_per_step=2", "batch.samples_per_prompt=3")


@pytest.fixture
def two_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ONE_SOURCE in RECIPE
    monkeypatch.setattr(runs, "RECIPE", RECIPE.replace(ONE_SOURCE, TWO_SOURCES))


def ledger_of(run: Path) -> Ledger:
    ledger = Ledger(run / "ledger.jsonl")
    assert ledger.audit().clean
    return ledger


def records(run: Path, step: int) -> list[dict[str, Any]]:
    return list(read_trajectories(run / "trajectories" / f"step_{step:06d}.parquet"))


@pytest.mark.usefixtures("two_sources")
@pytest.mark.slow
def test_prompts_are_drawn_by_weight_and_metrics_are_by_source(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ("schedule.steps=3", "checkpoint.every=2", "logging.trajectories=true")
    whole = train_here(tmp_path, tiny_model, *overrides)
    for row in steps_of(whole):
        assert (row["source/sums/prompts"], row["source/products/prompts"]) == (3, 1)
        rewards = [row["source/sums/reward"], row["source/products/reward"]]
        assert row["reward/mean"] == pytest.approx((3 * rewards[0] + rewards[1]) / 4)
    drawn = [next(one["row"] for one in records(whole, step) if one["row"] >= 40) for step in (1, 2, 3)]
    assert sorted(drawn[:2]) == [40, 41]  # both products once, before one comes again
    assert same_outcome(resumed_from(whole, 2, tmp_path, tiny_model, *overrides), whole, step=3)


def resumed_from(whole: Path, step: int, folder: Path, model: Path, *overrides: str) -> Path:
    """The run as if it had been killed some time after the checkpoint of that step, and started again."""
    killed = shutil.copytree(whole, folder / "runs" / "killed")
    for later in (killed / "checkpoints").iterdir():
        if later.name > f"step_{step:06d}":
            shutil.rmtree(later)
    return train_here(folder, model, *overrides, "name=killed")


@pytest.mark.slow
def test_a_resumed_curriculum_skips_what_the_undisturbed_one_does(tmp_path: Path, tiny_model: Path) -> None:
    hard = ("data.curriculum.mean_reward=[0.05, 1]", "data.curriculum.others=0.3", "data.curriculum.skip_failed=2")
    overrides = (*FOUR_ROWS, *hard, "schedule.steps=4", "checkpoint.every=2")
    whole = train_here(tmp_path, tiny_model, *overrides)
    assert same_outcome(resumed_from(whole, 2, tmp_path, tiny_model, *overrides), whole, step=4)
    audit = ledger_of(whole).audit()
    assert audit.trained == 8
    assert audit.dropped.keys() <= {FAILED, OUTSIDE}
    assert sum(row["samples/skipped"] for row in steps_of(whole)) == sum(audit.dropped.values()) > 0


def test_prompts_that_were_drawn_ahead_are_issued_again_and_what_was_skipped_is_not(tmp_path: Path) -> None:
    """As with `schedule.max_staleness`: the prompts of the next steps are drawn when the checkpoint is made."""

    def parts_of(history: RewardHistory) -> Any:
        batch, algorithm = SimpleNamespace(prompts_per_step=2), SimpleNamespace(dynamic_sampling=False)
        sampler = Sampler([SampledSource(3, 1.0), SampledSource(2, 2.0)], seed=0, shuffle=True)
        return SimpleNamespace(
            sampler=sampler, history=history, algorithm=algorithm, recipe=SimpleNamespace(batch=batch)
        )

    def draw(parts: Any, ledger: Ledger, step: int) -> list[SampledPrompt]:
        prompts = prompts_of_step(parts, ledger, step)
        ledger.issue(step, [prompt.prompt_id for prompt in prompts])
        return prompts

    curriculum = Curriculum(skip_solved=1)
    parts, ledger = parts_of(RewardHistory(curriculum, 5, seed=0)), Ledger(tmp_path / "ledger.jsonl")
    parts.history.record(3, [1.0], has_all=True)
    drawn = [draw(parts, ledger, step) for step in (1, 2, 3)]
    assert all(prompt.index != 3 for step in drawn for prompt in step)
    ledger.trained(1, [prompt.prompt_id for prompt in drawn[0]])
    state, snapshot = parts.sampler.state(), ledger.snapshot()
    num_skipped = [ledger.num_dropped(step, SKIP_REASONS) for step in (1, 2, 3)]
    parts.history.save(tmp_path)

    resumed, again = parts_of(RewardHistory(curriculum, 5, seed=0)), Ledger(tmp_path / "resumed.jsonl")
    resumed.sampler.load_state(state)
    resumed.history.load(tmp_path)
    again.restore(snapshot, 1)
    assert [draw(resumed, again, step) for step in (2, 3, 4)] == [*drawn[1:], draw(parts, ledger, 4)]
    assert [again.num_dropped(step, SKIP_REASONS) for step in (1, 2, 3)] == num_skipped
    assert sum(num_skipped) > 0
    assert again.audit().clean


def test_when_every_row_is_solved_all_come_back(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    always = ("environment.reward.name=regex", "environment.reward.options.pattern=(?s).*")
    run = train_here(tmp_path, tiny_model, *FOUR_ROWS, *always, "data.curriculum.skip_solved=1", "schedule.steps=3")
    assert [row["samples/retired_rows"] for row in steps_of(run)] == [2, 4, 2]
    assert "the curriculum would skip all rows" in caplog.text
    assert SOLVED not in ledger_of(run).audit().dropped


def test_rows_come_in_the_order_of_a_column_and_filters_are_reported(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"prompt": f"{number} = ?", "answer": "", "pass_rate": number / 10} for number in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_recipe(tmp_path, tiny_model).read_text()
    text = text.replace(ONE_SOURCE.replace("{{", "{").replace("}}", "}"), f"{{path: {tmp_path}/rows.jsonl}}")
    (tmp_path / "own.yaml").write_text(text)
    recipe = load_recipe(
        tmp_path / "own.yaml",
        [
            "data.train.filters={pass_rate: [0.2, 0.8]}",
            "data.curriculum.order_by=pass_rate",
            "data.curriculum.descending=true",
            "batch.prompts_per_step=2",
            "schedule.steps=1",
            "logging.trajectories=true",
        ],
    )
    plan, printed = make_plan(recipe), io.StringIO()
    run = train(recipe, plan, Console(printed))
    assert {one["prompt"].partition(" =")[0][-1] for one in records(run, 1)} == {"8", "7"}
    assert "only rows with `pass_rate` in [0.2, 0.8]" in plan.text()
    assert "each epoch goes from the highest to the lowest `pass_rate`" in plan.text()
    assert "3 of 10 rows left out by `filters` (3 by `pass_rate`)" in " ".join(printed.getvalue().split())
