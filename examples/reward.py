"""A reward function and rows from Python: a blank model learns to answer with digits.

Takes about 20 seconds on two CPU cores. The reward rises from 0.03 to about 0.7.
"""

import corral

RECIPE = {
    "name": "example-reward",
    "model": {"path": "blank-1m", "dtype": "float32"},  # a million random weights that read and write bytes
    "data": {"chat": False, "max_prompt_tokens": 16},
    "rollout": {"max_response_tokens": 8},
    "batch": {"prompts_per_step": 8, "samples_per_prompt": 8},
    "optimizer": {"learning_rate": 3e-3},
    "schedule": {"steps": 15},
    "checkpoint": {"resume": "never"},
}
ROWS = [{"prompt": f"{number} ", "answer": str(number)} for number in range(64)]


@corral.reward
def digits(response: str) -> float:
    """Share of the response that is digits."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


if __name__ == "__main__":
    run = corral.train(RECIPE, reward=digits, data=ROWS)
    rewards = run.metrics["reward/mean"].to_pylist()
    print(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}, checkpoint {run.checkpoint}")
