"""One group of 64 trajectories on one board, all concurrent against one at a time.

    python benchmarks/concurrent_trajectories.py           # about a minute on two cores
    python benchmarks/concurrent_trajectories.py --smoke

The environment is FrozenLake of 4 x 4 cells with up to 10 turns of up to 4 tokens, the model the built-in blank one, so
that turns are as many as they can be. `waiting` is the same with an environment that answers after 50 ms, as one that
asks another machine does. `environment.concurrency` is all that differs.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import replace
from typing import Any

from common import RESULTS

from corral.bench.comparison import BenchmarkReport
from corral.data.batch import Trajectory
from corral.data.rows import Row
from corral.envs.base import EnvSet, StepResult
from corral.envs.built_in.frozen_lake import FrozenLakeEnv
from corral.model.model_loading import default_device, load_model, load_tokenizer
from corral.recipe.schema import Environment, Model, Rollout
from corral.rollout.chat_rendering import ChatRenderer
from corral.rollout.driver import Prompt, RolloutDriver
from corral.rollout.engine import Sampling
from corral.rollout.native_engine import NativeEngine

SAMPLES = 64
LATENCY_S = 0.05
OPTIONS: dict[str, Any] = {"prompts": {"system": None}}
ROLLOUT = Rollout(max_turns=10, max_turn_tokens=4, max_response_tokens=1200)


class WaitingLakeEnv(FrozenLakeEnv):
    async def step(self, reply: str) -> StepResult:
        await asyncio.sleep(LATENCY_S)
        return await super().step(reply)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="2 trajectories")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--results", type=type(RESULTS), default=RESULTS)
    options = parser.parse_args()
    samples, rounds = (2, 1) if options.smoke else (SAMPLES, options.rounds)
    report = BenchmarkReport("concurrent_trajectories", "64 trajectories of one group", options.results, [])
    measured = {}
    for name, spec in {"FrozenLake": "frozen_lake", "waiting 50 ms a step": f"{__file__}:WaitingLakeEnv"}.items():
        at_once = [seconds(spec, samples, None, board) for board in range(rounds)]
        one_by_one = [seconds(spec, samples, 1, board) for board in range(rounds)]
        measured[name] = {
            "all at once, s": statistics.median(at_once),
            "one at a time, s": statistics.median(one_by_one),
            "ratio": statistics.median(b / a for a, b in zip(at_once, one_by_one, strict=True)),
        }
    rows = [[name, *(f"{number:.2f}" for number in found.values())] for name, found in measured.items()]
    heading = f"{samples} trajectories on one board, median of {rounds}"
    report.add("concurrent_trajectories", heading, ["environment", *measured["FrozenLake"]], rows, measured)


def seconds(environment: str, samples: int, concurrency: int | None, board: int) -> float:
    model = Model(path="blank-1m", dtype="float32")
    engine = NativeEngine(
        load_model(model, default_device()),
        load_tokenizer(model),
        max_sequences=SAMPLES,
        max_prefill_tokens=4096,
        max_length=2048,
    )
    envs = EnvSet({"": Environment(name=environment, options=OPTIONS, concurrency=concurrency)}, {}, ROLLOUT)
    driver = RolloutDriver(
        engine=engine,
        envs=envs,
        chat=ChatRenderer(engine.tokenizer, True),
        max_turns=ROLLOUT.max_turns,
        max_prompt_tokens=800,
        max_response_tokens=ROLLOUT.max_response_tokens,
        max_turn_tokens=ROLLOUT.max_turn_tokens,
        seed=0,
    )
    row = Row([], None, "", {"seed": board})
    sampling = replace(Sampling(max_tokens=1000), stop_tokens=frozenset({engine.tokenizer.eos_token_id}))

    async def play() -> tuple[float, list[Trajectory]]:
        started = time.perf_counter()
        played = await driver.roll_out([Prompt(0, 0, row, [1])], samples, sampling)
        return time.perf_counter() - started, played

    try:
        took, played = asyncio.run(play())
        assert all(trajectory.error is None for trajectory in played), played[0].error
        return took
    finally:
        envs.close()
        engine.close()


if __name__ == "__main__":
    main()
