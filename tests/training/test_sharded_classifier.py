"""A reward model that several ranks have together scores as transformers does with the whole one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sharded_cases import mesh_of
from team import Team
from tiny import save_tiny_classifier
from transformers import AutoModelForSequenceClassification

from corral.model.sequence_classifier import load_classifier
from corral.recipe.mesh import MeshShape
from corral.recipe.schema import RewardModel
from corral.runtime.reward_model_worker import ShardedClassifier
from corral.training.sharding import local_tensor

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
SEQUENCES = [[5, 9, 33, 7], [60, 12, 44, 8, 9, 10, 11], [7], [8, 9] * 20, [44] * 5, [13, 14, 15]]


def score_on_mesh(folder: Path, shape: MeshShape, offload: bool) -> tuple[list[float], float]:
    """(scores of this rank's sequences, fraction of all numbers that it holds). The last rank has no sequences."""
    settings = RewardModel(path=str(folder), dtype="float32")
    mesh, whole = mesh_of(shape), load_classifier(settings, CPU, max_tokens=16, offload=True)
    assert mesh is not None
    num_all = sum(parameter.numel() for parameter in whole.model.parameters())
    classifier = ShardedClassifier.of(whole, mesh, offload)
    own = [SEQUENCES[i] for i in range(len(SEQUENCES)) if i % (shape.size - 1) == mesh.rank]
    scores = [classifier.scores(own), classifier.scores(own)]
    assert scores[0] == scores[1]
    return scores[0], sum(local_tensor(p).numel() for p in classifier.model.parameters()) / num_all


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("shape", [MeshShape(shard=2), MeshShape(shard=3), MeshShape(replicate=2, shard=2)], ids=str)
def test_scores_are_those_of_the_whole_model(
    team: Callable[[int], Team], tmp_path: Path, shape: MeshShape, offload: bool
) -> None:
    save_tiny_classifier(tmp_path, "llama", pad_token_id=0)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [float(plain(torch.tensor([one])).logits[0, 0]) for one in SEQUENCES]
    assert max(expected) - min(expected) > 1e-2
    answers = team(shape.size).run(score_on_mesh, tmp_path, shape, offload)
    for rank, (scores, held) in enumerate(answers):
        own = [expected[i] for i in range(len(SEQUENCES)) if i % (shape.size - 1) == rank]
        assert scores == pytest.approx(own, abs=1e-5)
        assert held < 1.2 / shape.shard
    assert answers[-1][0] == []
