"""What is written down of trajectories: texts of tokens, turns, branches, why they were left out, and the numbers that
training used."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from deadlines import within
from hypothesis import given
from hypothesis import strategies as st
from runs import train_here
from tiny import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trajectories import make_trajectory
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from corral.data.batch import Batch
from corral.data.rows import Message, Row
from corral.loop import train_step, training_loop
from corral.loop.trajectory_process import WriterProcess
from corral.loop.trajectory_records import (
    BackgroundWriter,
    StepTrajectories,
    TokenTexts,
    asked_by,
    find_branches,
    trajectory_records,
    turn_spans,
    writes_here,
)
from corral.model.model_loading import load_tokenizer
from corral.observe.run_files import read_metrics
from corral.observe.run_folder import RunFolder
from corral.observe.trajectory_store import TrajectoryStore, TrajectoryWriter
from corral.recipe.errors import RunError
from corral.recipe.schema import Model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, so that most characters have several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = TokenTexts(byte_tokenizer())


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_a_character_of_several_tokens_is_added_by_the_last_of_them(text: str) -> None:
    tokens = np.array(BYTES.tokenizer.encode(text, add_special_tokens=False), np.int64)
    expected = [length for letter in text for length in [0] * (len(letter.encode()) - 1) + [1]]
    assert BYTES.decode(tokens) == (text, expected)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_lengths_of_any_bytes_add_up_to_the_text(ids: list[int]) -> None:
    text, lengths = BYTES.decode(np.array(ids, np.int64))
    assert text == BYTES.tokenizer.decode(ids)
    assert (len(lengths), sum(lengths)) == (len(ids), len(text))
    assert min(lengths, default=0) >= 0


def test_a_space_that_the_decoder_strips_moves_no_other_token() -> None:
    """As with SentencePiece's tokenizers: the first token of a text loses its space."""
    vocabulary = {token: i for i, token in enumerate(["▁the", "▁c", "at", "a", "▁"])}
    tokenizer = Tokenizer(models.Unigram([(token, -1.0) for token in vocabulary]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert texts.decode(np.array([0, 1, 2, 0])) == ("the cat the", [3, 2, 2, 4])


def test_turns_end_at_observations_and_at_their_rewards() -> None:
    trajectory = make_trajectory([1, 2], [3, 4, 5, 6, 7, 8])
    trajectory.generated = np.array([0, 0, 1, 1, 1, 0, 1, 1], np.bool_)
    trajectory.turn_rewards = [(3, 0.0), (4, 0.5), (7, 1.0)]
    assert turn_spans(trajectory) == [(2, 4), (4, 5), (6, 8)]


def test_a_row_is_asked_for_by_its_last_question_and_its_answer_is_text() -> None:
    talk = [("user", "Hi"), ("assistant", "Hello"), ("user", "1 + 1?")]
    prompt: list[Message] = [{"role": role, "content": text} for role, text in talk]
    assert asked_by(Row(prompt, 2, "", {})) == ("1 + 1?", "2")
    assert asked_by(Row(prompt, "zwei ü", "", {})) == ("1 + 1?", "zwei ü")
    assert asked_by(Row([], {"a": ["ü"]}, "", {})) == ("", '{"a": ["ü"]}')
    assert asked_by(Row(prompt[:1], None, "", {})) == ("Hi", None)


def test_branches_make_one_tree_of_the_samples_of_a_prompt() -> None:
    responses = [[5, 6, 7], [5, 6], [9], [5, 6, 8], [5, 6, 7]]
    samples = [make_trajectory([1, 2], own, sample=i) for i, own in enumerate(responses)]
    branches = find_branches([*samples, make_trajectory([1, 2], [5], group=1)])
    assert branches == [(1, 4), (None, 0), (3, 2), (4, 4), (0, 5), (None, 0)]
    # Each trajectory is its parent's beginning, and then its own tokens.
    for sample, (parent, num_shared) in zip(samples, branches, strict=False):
        if parent is not None:
            assert sample.tokens[:num_shared].tolist() == samples[parent].tokens[:num_shared].tolist()


def test_a_record_has_the_text_of_each_token() -> None:
    tokenizer = tiny_tokenizer()
    prompt, response = tokenizer.encode("1 + 1 ="), tokenizer.encode("two!<|end|>")
    [record] = trajectory_records([make_trajectory(prompt, response)], TokenTexts(tokenizer))
    assert (record["prompt"], record["response"]) == ("1 + 1 =", "two!<|end|>")
    assert (record["prompt_chars"], record["response_chars"]) == ([1] * 7, [1, 1, 1, 1, 7])


def test_a_run_keeps_the_trajectories_of_so_many_last_steps(tmp_path: Path, tiny_model: Path) -> None:
    overrides = ("logging.trajectories=true", "logging.keep_trajectories=2", "schedule.steps=3")
    run = train_here(tmp_path, tiny_model, *overrides, "checkpoint.at_end=false")
    assert sorted(path.name for path in (run / "trajectories").iterdir()) == [
        "step_000002.parquet",
        "step_000003.parquet",
    ]


@pytest.mark.parametrize("old", ["engine", "recompute"])
@pytest.mark.slow
def test_numbers_in_the_store_are_those_that_were_trained_with(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    trained: list[Batch] = []
    train = train_step.train

    async def remember(parts: Any, batch: Batch, *others: Any) -> Any:
        trained.append(batch)
        return await train(parts, batch, *others)

    monkeypatch.setattr(train_step, "train", remember)
    overrides = (f"algorithm.old_logprobs={old}", "logging.trajectories=true", "schedule.steps=1")
    run = train_here(tmp_path, tiny_model, *overrides)
    [batch] = trained
    frame = pandas.read_parquet(run / "trajectories" / "step_000001.parquet")
    store = TrajectoryStore(run / "trajectories")
    assert len(frame) == len(batch) > 0
    assert ("old_logprobs" in store.trajectory(1, 0)) == (old == "recompute")
    for i, row in frame.iterrows():
        span = slice(batch.offsets[i], batch.offsets[i + 1])
        behind = slice(batch.offsets[i] + row["num_prompt_tokens"], batch.offsets[i + 1])
        assert [*row["prompt_tokens"], *row["response_tokens"]] == batch.tokens[span].tolist()
        assert row["generated"].tolist() == batch.generated[behind].tolist()
        assert row["versions"].tolist() == batch.versions[behind].tolist()
        assert row["reward"] == batch.token_rewards[span].sum()
        assert np.array_equal(row["logprobs"], batch.logprobs[behind])
        assert np.array_equal(row["advantages"], batch.columns["advantages"][behind])
        if old == "recompute":
            assert np.array_equal(row["old_logprobs"], batch.columns["old_logprobs"][behind])
        assert len(row["generate_s"]) == len(row["environment_s"]) == row["num_turns"]
        assert (row["generate_s"] > 0).all()
        assert "".join(store.trajectory(1, i)["response_pieces"]) == row["response"]
        assert row["question"] in row["prompt"]
        assert row["answer"].isdigit()


@pytest.mark.slow
def test_what_dynamic_sampling_leaves_out_is_written_down_with_the_reason(tmp_path: Path, tiny_model: Path) -> None:
    rare = ("environment.reward.name=regex", "environment.reward.options.pattern=^[a-m]")
    overrides = ("algorithm.name=dapo", "logging.trajectories=true", "schedule.steps=2", *rare)
    run = train_here(tmp_path, tiny_model, *overrides)
    frame = pandas.concat([pandas.read_parquet(file) for file in sorted((run / "trajectories").iterdir())])
    rows = pandas.read_json(run / "metrics.jsonl", lines=True)
    filtered = frame[frame["left_out"] == "zero-variance group"]
    assert filtered["prompt_id"].nunique() == rows["samples/dropped_groups"].sum() > 0
    assert (filtered.groupby("prompt_id")["reward"].nunique() == 1).all()
    assert filtered["advantages"].isna().all()
    assert frame["left_out"].isna().sum() == rows["samples/trajectories"].sum()


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.slow
def test_entropies_and_logprobs_are_those_of_the_model_that_was_trained(
    tmp_path: Path, tiny_model: Path, epochs: int
) -> None:
    overrides = ("logging.trajectories=true", "schedule.steps=1", f"batch.ppo_epochs={epochs}")
    run = train_here(tmp_path, tiny_model, *overrides)
    frame = pandas.read_parquet(run / "trajectories" / "step_000001.parquet")
    known = frame[frame["entropies"].notna()]
    # Where the algorithm needs nothing else, only trajectories with an advantage are computed.
    assert known["prompt_id"].tolist() == frame[frame["advantages"].map(lambda own: own.any())]["prompt_id"].tolist()
    assert len(known)
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    for _, row in known.iterrows():
        tokens, start = [*row["prompt_tokens"], *row["response_tokens"]], row["num_prompt_tokens"]
        with torch.no_grad():
            log_p = model(torch.tensor([tokens])).logits[0, start - 1 : -1].log_softmax(-1)
        expected = -(log_p.exp() * log_p).sum(-1).numpy() * row["generated"]
        assert row["entropies"] == pytest.approx(expected, abs=1e-4)
        own = log_p[range(len(log_p)), row["response_tokens"].tolist()].numpy() * row["generated"]
        assert row["trained_logprobs"] == pytest.approx(own, abs=1e-4)
        log_ratio = row["trained_logprobs"] - row["logprobs"]
        assert row["worst_ratio_at"] == abs(log_ratio).argmax()
        assert row["worst_ratio"] == pytest.approx(np.exp(log_ratio[row["worst_ratio_at"]]), rel=1e-5)
    if epochs == 1:
        [metrics] = [line for line in read_metrics(run / "metrics.jsonl") if "policy/entropy" in line]
        total = known["entropies"].map(sum).sum() / known["generated"].map(sum).sum()
        assert metrics["policy/entropy"] == pytest.approx(total, rel=1e-5)


def test_details_of_pieces_are_joined() -> None:
    first, second = (Batch.of([make_trajectory([5, 6], [7, 8, 9]), make_trajectory([5], [7])]) for _ in range(2))
    first.set_details([1], {"entropies": np.array([0, 2], np.float32)})
    joined = Batch.join([second, first]).details["entropies"]
    assert np.array_equal(joined, [np.nan] * 12 + [0, 2], equal_nan=True)
    assert Batch.join([second, second]).details == {}
    assert first.take([1]).details == {}


# --- in a thread, and in a process


def slow_writes(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    write = TrajectoryWriter.write

    def slow(*arguments: Any) -> Path:
        time.sleep(0.3)
        if error is not None:
            raise error
        return write(*arguments)

    monkeypatch.setattr(TrajectoryWriter, "write", slow)


def background_writer(folder: Path) -> BackgroundWriter:
    return BackgroundWriter(writes_here(folder, tiny_tokenizer()))


def test_a_write_that_is_slow_stops_nobody_but_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    permits, write = threading.Semaphore(0), TrajectoryWriter.write

    def held(*arguments: Any) -> Path:
        assert permits.acquire(timeout=within(10)), "nobody has let it be written"
        return write(*arguments)

    monkeypatch.setattr(TrajectoryWriter, "write", held)
    with background_writer(tmp_path) as writer:
        writer.write(StepTrajectories(1, []))
        assert not any(tmp_path.iterdir())
        threading.Timer(0.1, permits.release).start()
        writer.write(StepTrajectories(2, []))
        assert [path.name for path in tmp_path.iterdir()] == ["step_000001.parquet"]
        permits.release()
    assert TrajectoryStore(tmp_path).parts() == [(1, ""), (2, "")]


def test_what_a_write_raises_is_raised_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_writes(monkeypatch, OSError("disk full"))
    for use in (lambda: writer.write(StepTrajectories(2, [])), lambda: writer.flush()):
        with background_writer(tmp_path) as writer:
            writer.write(StepTrajectories(1, []))
            with pytest.raises(OSError, match="disk full"):
                use()
    with pytest.raises(OSError, match="disk full"), background_writer(tmp_path) as writer:
        writer.write(StepTrajectories(1, []))
    writer = background_writer(tmp_path)
    writer.write(StepTrajectories(1, []))
    with pytest.raises(ValueError, match="another"), writer:
        raise ValueError("another reason to end")


def test_a_checkpoint_has_the_files_of_its_steps(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_writes(monkeypatch)
    there: dict[int, list[tuple[int, str]]] = {}
    save = training_loop.begin_save

    async def look(parts: Any, ledger: Any, folder: RunFolder, step: int, *others: Any) -> Any:
        there[step] = TrajectoryStore(folder.trajectories).parts()
        return await save(parts, ledger, folder, step, *others)

    monkeypatch.setattr(training_loop, "begin_save", look)
    train_here(tmp_path, tiny_model, "logging.trajectories=true", "schedule.steps=2", "checkpoint.every=1")
    assert there == {step: [(earlier, "") for earlier in range(1, step + 1)] for step in there}
    assert set(there) == {1, 2}


def some_trajectories(step: int) -> StepTrajectories:
    """Of a batch of two, and one that was left out."""
    trajectories = [make_trajectory([5, 6], [7, 8, sample]) for sample in (9, 10, 11)]
    batch = Batch.of(trajectories[:2])
    columns = {"advantages": np.arange(len(batch.tokens), dtype=np.float32)}
    reasons = [None, None, "zero-variance group"]
    return StepTrajectories(step, trajectories, left_out=reasons, columns=columns, offsets=batch.offsets)


@pytest.mark.slow
def test_a_process_writes_the_same_files(tmp_path: Path, tiny_model: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    model = Model(path=str(tiny_model))
    tokenizer = load_tokenizer(model)
    write = writes_here(here, tokenizer)
    process = WriterProcess(there, model, tokenizer, tmp_path / "logs" / "trajectories.log")
    for own in (some_trajectories(1), some_trajectories(2), StepTrajectories(2, [], "validation")):
        write(own)
        process.write(own)
    process.close()
    assert sorted(path.name for path in here.iterdir()) == sorted(path.name for path in there.iterdir())
    assert all(path.read_bytes() == (there / path.name).read_bytes() for path in here.iterdir())
    kept = TrajectoryStore(there).trajectory(1, 1)
    assert (kept["advantages"], kept["left_out"]) == ([7.0, 8.0, 9.0], None)
    assert TrajectoryStore(there).trajectory(1, 2)["left_out"] == "zero-variance group"


@pytest.mark.slow
def test_a_step_is_written_by_a_new_process_where_the_first_was_killed(tmp_path: Path, tiny_model: Path) -> None:
    model = Model(path=str(tiny_model))
    process = WriterProcess(tmp_path, model, load_tokenizer(model), tmp_path / "trajectories.log")
    process.write(some_trajectories(1))
    first = process._process
    assert first is not None
    first.kill()
    first.wait()
    process.write(some_trajectories(2))
    assert TrajectoryStore(tmp_path).parts() == [(1, ""), (2, "")]
    process.close()


class CannotBePickled:
    """As a tokenizer with code of its own: the process loads it itself."""

    def __reduce__(self) -> str:
        raise TypeError("no")


@pytest.mark.slow
def test_what_goes_wrong_in_the_process_is_raised_here(tmp_path: Path, tiny_model: Path) -> None:
    log = tmp_path / "trajectories.log"
    model = Model(path=str(tiny_model))
    gone = WriterProcess(tmp_path / "gone", model, load_tokenizer(model), log)
    with pytest.raises(FileNotFoundError, match="gone"):
        gone.write(some_trajectories(1))
    gone.close()
    without = WriterProcess(tmp_path, Model(path=str(tmp_path / "no-model")), CannotBePickled(), log)
    with pytest.raises(RunError, match="no-model is not a folder"):
        without.write(some_trajectories(1))
    without.close()
