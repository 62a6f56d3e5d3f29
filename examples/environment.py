"""An environment with several turns: the model guesses a digit and hears whether it was too low or too high.

Takes about 30 seconds on two CPU cores.
"""

from typing import Any

import corral

RECIPE = {
    "name": "example-environment",
    "model": {"path": "blank-1m", "dtype": "float32"},
    "data": {"chat": False, "max_prompt_tokens": 16},
    "rollout": {"max_response_tokens": 16, "max_turns": 4, "max_turn_tokens": 1},
    "batch": {"prompts_per_step": 8, "samples_per_prompt": 8},
    "optimizer": {"learning_rate": 3e-3},
    "schedule": {"steps": 20},
    "checkpoint": {"resume": "never"},
}


class GuessDigit(corral.Env):
    """The row's prompt is the opening; every reply is one guess."""

    async def reset(self, row: Any, seed: int) -> Any:
        self.secret = row.answer  # of the row: samples of a prompt are compared, and so have the same game
        return row.prompt

    async def step(self, reply: str) -> corral.StepResult:
        if not reply.isdigit():
            return corral.StepResult([{"role": "user", "content": "?"}], -0.1, done=False)
        guess = int(reply)
        if guess == self.secret:
            return corral.StepResult([], 1.0, done=True)
        hint = "<" if guess < self.secret else ">"
        return corral.StepResult([{"role": "user", "content": hint}], 0.0, done=False)


if __name__ == "__main__":
    run = corral.train(RECIPE, environment=GuessDigit, data=[{"prompt": "guess ", "answer": n % 10} for n in range(64)])
    rewards = run.metrics["reward/mean"].to_pylist()
    print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    for record in run.trajectories()[:3]:
        print(repr(record["response"]), record["reward"])
