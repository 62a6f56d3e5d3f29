"""Run folders for the tests of `corral view`, written with the parts that a run writes with."""

import json
from pathlib import Path
from typing import Any

from corral.observe.ledger import Ledger
from corral.observe.run_files import MetricsFile
from corral.observe.run_folder import RunFolder
from corral.observe.trajectory_store import TrajectoryWriter

HOSTILE = (
    "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\u202etxt\x1b[31m\x00 "
    '"><svg onload=window.hacked=1>'
)
PLAN = {
    "placement": {"actor": [0, 1, 3, 4], "reference": [0, 1, 3, 4], "rollout": [2], "idle": []},
    "cluster": {"nodes": 2, "devices_per_node": 3, "devices_of_services": {"judge": [5]}},
    "memory": [{"devices": [0, 1, 3, 4], "total": {"rollout": 2**30, "train": 3 * 2**30}}],
}
"""Of two nodes; what the picture of the placement needs of a plan."""
RECIPE = "name: {name}\nmodel: {{path: {model}}}\nalgorithm: {{name: grpo}}\nschedule: {{steps: {steps}}}\n"


def record(prompt_id: int, sample: int, reward: float | None, text: str = "ab") -> dict[str, Any]:
    tokens = [5 + (prompt_id + sample * place) % 40 for place in range(6)]
    return {
        "prompt_id": prompt_id, "sample": sample, "row": prompt_id, "tag": "", "reward": reward, "rewards": {"a": 1.0},
        "turn_rewards": [(reward or 0.0) / 2] * 2, "stop": "length", "error": None, "prompt": text, "response": text,
        "question": f"What is {prompt_id} and {text}?", "answer": f"{prompt_id}{text}",
        "metrics": {"success": reward or 0.0}, "prompt_tokens": [1, 2, 3], "response_tokens": tokens,
        "generated": [1, 1, 0, 1, 1, 1],
        "logprobs": [-0.25 * place - 0.125 * sample for place in range(6)],
        "trained_logprobs": [-0.25 * place - 0.125 * sample * (place != 4) for place in range(6)],
        "generate_s": [0.5, 0.25 * sample], "environment_s": [0.0, 0.125], "versions": [0, 0, -1, 1, 1, 1],
        "advantages": [(reward or 0.0) - 0.5] * 6, "entropies": [0.5 * place for place in range(6)],
        "frames": ["P_G", "_PG", f"__{text}"],
    }  # fmt: skip


def metrics_of(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 7, "policy/entropy": 3 - step / 9, "policy/loss": float("nan") if step == 2 else 1.0,
        "samples/errors": 0.0, "time/step_s": 3.0, "time/rollout_s": 1.5, "time/train_s": 1.25,
        "speed/tokens_per_s": 100.0 + step,
    }  # fmt: skip


def write_run(folder: Path, name: str, steps: int = 3, of: int = 3, text: str = "ab", model: str = "blank-1m") -> Path:
    """A run that is not being written any more."""
    with RunFolder(folder / name) as run:
        run.write_recipe(RECIPE.format(name=name, model=model, steps=of))
        run.write_plan("one device", PLAN)
        metrics, ledger, writer = MetricsFile(run.metrics), Ledger(run.ledger), TrajectoryWriter(run.trajectories)
        metrics.log(0, {"validation/mean@1": 0.25, "validation/ci95": 0.1})
        for step in range(1, steps + 1):
            prompts = [2 * step - 2, 2 * step - 1]
            ledger.issue(step, prompts)
            ledger.generated(step, prompts)
            ledger.trained(step, prompts)
            metrics.log(step, metrics_of(step))
            writer.write(step, [record(prompt, sample, sample / 4, text) for prompt in prompts for sample in range(4)])
        metrics.log(steps, {"validation/mean@1": 0.75, "validation/ci95": 0.1})
        writer.write(steps, [record(0, 0, 1.0, text)], part="validation")
        (run.logs / "main.log").write_text(f"2026-01-01T00:00:00+0000 WARNING corral.x: {text}\n", errors="replace")
    return folder / name


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_workers(run: Path, text: str = "ab", now: float = 0.0) -> None:
    """Two nodes with two devices each, as the controller of a run on a cluster writes them."""
    states = [
        ("busy", "actor.accumulate", now - 75),
        ("idle", "", None),
        ("silent", "rollout.collect", now),
        ("lost", "", None),
    ]
    workers = [
        {
            "node": f"host{device // 2}", "address": f"10.0.0.{device // 2 + 1}", "device": device, "pid": 100 + device,
            "roles": ["actor", "reference"] if device < 2 else ["rollout"], "state": state, "call": call,
            "since": since, "log": f"worker-{device}.log" if device < 2 else None,
        }
        for device, (state, call, since) in enumerate(states)
    ]  # fmt: skip
    (run / "logs" / "workers.json").write_text(json.dumps({"written": now, "workers": workers}))
    (run / "logs" / "worker-0.log").write_text(f"process 100\nlast words: {text}\n", errors="replace")
