"""A run has the mesh that its plan has chosen."""

from pathlib import Path

import pytest
from runs import steps_here

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
TWO_DEVICES = ("cluster.devices_per_node=2", "schedule.steps=1")


@pytest.mark.parametrize(
    ("memory", "is_whole"), [("cluster.device_memory=4", True), ("cluster.device_memory=null", False)]
)
def test_weights_travel_only_where_the_plan_shards(
    tmp_path: Path, tiny_model: Path, memory: str, is_whole: bool
) -> None:
    """An engine decodes with the tensors of a trainer that holds a whole copy; shards are gathered, and compared."""
    [step] = steps_here(tmp_path, tiny_model, *TWO_DEVICES, memory)
    assert ("transfer/probe_deviation" not in step) == is_whole


SAME = ("reward/mean", "policy/loss", "policy/gradient_norm", "policy/entropy", "kl/mean", "length/mean")


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_in_pipeline_stages_is_that_of_one_process(tmp_path: Path, tiny_model: Path, algorithm: str) -> None:
    """Actor, reference and critic are in stages; engines get weights that are gathered from them."""
    overrides = (f"algorithm.name={algorithm}", "algorithm.kl.where=loss", "batch.max_tokens_per_micro_batch=128")
    alone = steps_here(tmp_path, tiny_model, "name=alone", *overrides, "schedule.steps=3")
    stages = ("cluster.devices_per_node=2", "train.parallel.pipeline=2")
    staged = steps_here(tmp_path, tiny_model, "name=staged", *overrides, "schedule.steps=3", *stages)
    keys = (*SAME, "value/loss") if algorithm == "ppo" else SAME
    for one, other in zip(staged, alone, strict=True):
        assert [one[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-4, abs=1e-6)
        assert one["transfer/probe_deviation"] < 1e-4
        assert 0 < one["updates/pipeline_bubble"] < 0.5
        assert "updates/pipeline_bubble" not in other
