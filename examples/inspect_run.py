"""Plan, train, and look at what came of it: metrics as a table, trajectories, a checkpoint evaluated.

Takes about 30 seconds on two CPU cores.
"""

import corral

RECIPE = {
    "name": "example-inspect",
    "model": {"path": "blank-1m", "dtype": "float32"},
    "data": {
        "chat": False,
        "train": {"path": "arithmetic:addition", "size": 64, "options": {"max": 9, "part": "train"}},
        "validation": {"path": "arithmetic:addition", "size": 8, "options": {"max": 9, "part": "validation"}},
    },
    "environment": {"reward": {"name": "regex", "options": {"pattern": "[0-9]"}}},
    "rollout": {"max_response_tokens": 8},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
    "schedule": {"steps": 3},
    "checkpoint": {"resume": "never"},
}

if __name__ == "__main__":
    plan = corral.plan(RECIPE)
    print(plan.text())

    run = corral.train(RECIPE, quiet=True)
    table = run.metrics.select(["step", "reward/mean", "policy/loss"])
    for row in table.to_pylist():
        print(row)
    print(run.trajectories(step=1)[0]["response"])

    print(corral.evaluate(RECIPE, model=run.checkpoint)["validation/mean@1"])
