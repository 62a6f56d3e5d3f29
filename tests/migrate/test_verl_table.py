"""What verl's table says beside values. What becomes of single keys is in `golden`."""

import pytest
from foreign import read

from corral.migrate.config_sources import table_of

AGGREGATION = "actor_rollout_ref.actor.loss_agg_mode"


@pytest.mark.parametrize(
    ("written", "differs"),
    [
        ([f"{AGGREGATION}=seq-mean-token-mean"], True),
        ([f"{AGGREGATION}=token-mean"], False),
        ([f"{AGGREGATION}=seq-mean-token-mean", "critic.loss_agg_mode=token-mean"], False),
        ([f"{AGGREGATION}=seq-mean-token-mean", "algorithm.adv_estimator=grpo"], False),
    ],
)
def test_a_critics_loss_that_verl_aggregates_otherwise_is_named(written: list[str], differs: bool) -> None:
    needed = ["actor_rollout_ref.model.path=model", "data.train_files=train.parquet", "actor_rollout_ref.rollout.n=4"]
    migration = read(table_of("verl"), *needed, "algorithm.adv_estimator=gae", *written)
    assert [entry.outcome.differs for entry in migration.entries if entry.given.key == AGGREGATION] == [differs]
