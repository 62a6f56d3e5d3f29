"""Training with a search engine beside it: one that is started with the run, dies, and is started again."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from commands import start_corral
from deadlines import wait_until
from served import free_port

from corral.observe.run_files import read_metrics
from corral.retrieval.index import build

ENVIRONMENT = '''
from corral.envs.built_in.search import SearchEnv


class SearchesAll(SearchEnv):
    """Takes every reply for a search, and the last one for an answer: the model of this test cannot write
    tags."""

    async def step(self, reply):
        tag = "search" if self._turns < self._max_turns else "answer"
        return await super().step(f"<{tag}>passage {len(reply)} {reply}</{tag}>")
'''
RECIPE = """\
name: tiny
model: {{path: {model}, dtype: float32}}
data:
  chat: false
  train: {{path: {folder}/questions.jsonl}}
  max_prompt_tokens: 48
environment:
  name: {folder}/searching.py:SearchesAll
  options:
    retriever: http://127.0.0.1:{port}
    topk: 1
    prompt: null
    cache_size: 1
    patience_s: 60
  reward: {{name: f1, workers: 1}}
rollout: {{max_turns: 1, max_turn_tokens: 6, max_observation_tokens: 24, max_response_tokens: 64}}
batch: {{prompts_per_step: 4, samples_per_prompt: 4, max_tokens_per_micro_batch: 512}}
optimizer: {{learning_rate: 0.001}}
schedule: {{steps: 40}}
logging: {{runs: {folder}/runs, curve: false}}
cluster:
  {runtime}
  services:
    retriever: {{retriever: {folder}/index, port: {port}}}
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    corpus = tmp_path / "corpus.jsonl"
    passages = [{"id": str(i), "contents": f'"Passage {i}"\nThis is passage {i} of forty.'} for i in range(40)]
    corpus.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    build(corpus, tmp_path / "index", "bm25")
    rows = [{"prompt": f"Which is passage {i}?", "answer": str(i)} for i in range(40)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "searching.py").write_text(ENVIRONMENT)
    return tmp_path


def write_recipe(folder: Path, model: Path, runtime: str) -> None:
    text = RECIPE.format(folder=folder, model=model, port=free_port(), runtime=runtime)
    (folder / "recipe.yaml").write_text(text)


def retriever_pids(folder: Path) -> list[int]:
    """Of the retrievers that serve the test's own index."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"retriever" in words and f"{folder}/index".encode() in words:
            found.append(int(entry.parent.name))
    return found


def steps_of(folder: Path) -> int:
    file = folder / "runs/tiny/metrics.jsonl"
    return max((row["step"] for row in read_metrics(file)), default=0) if file.exists() else 0


@pytest.mark.xdist_group("ray")
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["runtime: local", "devices_per_node: 1"])
def test_a_retriever_that_is_killed_is_started_again_and_the_run_goes_on(
    folder: Path, tiny_model: Path, runtime: str
) -> None:
    write_recipe(folder, tiny_model, runtime)
    command = start_corral(folder, "train", "recipe.yaml")
    command.wait_until(lambda: steps_of(folder) >= 3)
    [pid] = retriever_pids(folder)
    os.kill(pid, signal.SIGKILL)
    at = steps_of(folder)
    command.wait_until(lambda: steps_of(folder) >= at + 10)
    assert retriever_pids(folder) not in ([], [pid])
    command.send(signal.SIGINT)
    command.wait()
    rows = [row for row in read_metrics(folder / "runs/tiny/metrics.jsonl") if "reward/mean" in row]
    assert len(rows) >= at + 10
    assert sum(row["samples/errors"] for row in rows) == 0  # they waited for it
    assert all(row["environment/searches"] == 1 for row in rows)
    wait_until(lambda: not retriever_pids(folder), 20)  # it does not outlive the run


@pytest.mark.slow
def test_an_index_that_is_not_there_ends_the_run_at_the_start(folder: Path, tiny_model: Path) -> None:
    write_recipe(folder, tiny_model, "runtime: local")
    command = start_corral(folder, "train", "recipe.yaml", "cluster.services.retriever.retriever=nowhere")
    output = command.wait().stderr
    assert re.search(r"error: `cluster.services.retriever` ended with exit code 2; .*nowhere", output), output
