"""A run has the mesh that its plan has chosen."""

from pathlib import Path

import pytest
from runs import steps_here

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
TWO_DEVICES = ("cluster.devices_per_node=2", "cluster.start_timeout_s=120", "schedule.steps=1")


@pytest.mark.parametrize(
    ("memory", "is_whole"), [("cluster.device_memory=4", True), ("cluster.device_memory=null", False)]
)
def test_weights_travel_only_where_the_plan_shards(
    tmp_path: Path, tiny_model: Path, memory: str, is_whole: bool
) -> None:
    """An engine decodes with the tensors of a trainer that holds a whole copy; shards are gathered, and compared."""
    [step] = steps_here(tmp_path, tiny_model, *TWO_DEVICES, memory)
    assert ("transfer/probe_deviation" not in step) == is_whole
