"""What happened to every prompt: each is trained once or dropped, whatever was lost in between."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from commands import corral
from deadlines import within
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.observe.ledger import Ledger, format_spans, parse_spans, prompt_ids_in
from corral.recipe.errors import RunError, UserError


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def one_step(ledger: Ledger, step: int, prompt_ids: range) -> None:
    ledger.issue(step, prompt_ids)
    ledger.generated(step, prompt_ids)
    ledger.trained(step, prompt_ids)


def append(ledger: Ledger, record: dict[str, object]) -> Ledger:
    """The ledger with a line that it would refuse to write itself, or that someone else wrote."""
    with ledger.path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return Ledger(ledger.path)


# --- what is written


def test_a_line_has_the_ordinals_as_spans(ledger: Ledger) -> None:
    ledger.issue(4, [41, 32, 33, 34])
    ledger.dropped(4, [41], "equal rewards")
    assert ledger.path.read_text() == (
        '{"step": 4, "issued": "32-34,41"}\n{"step": 4, "dropped": "41", "reason": "equal rewards"}\n'
    )


def test_an_ordinal_that_is_given_once_for_each_sample_counts_once(ledger: Ledger) -> None:
    ledger.issue(1, [0, 1])
    ledger.trained(1, [0, 0, 0, 1, 1])
    assert ledger.audit().trained == 2
    assert ledger.audit().clean


def test_no_ordinals_are_no_line(ledger: Ledger) -> None:
    ledger.dropped(1, [], "equal rewards")
    assert not ledger.path.exists()


def test_numbers_of_numpy_are_as_good_as_others(ledger: Ledger) -> None:
    ledger.issue(1, np.arange(3))
    ledger.trained(1, np.arange(3, dtype=np.int32))
    assert Ledger(ledger.path).audit().trained == 3


def test_what_is_open_is_known_by_step(ledger: Ledger) -> None:
    ledger.issue(1, range(4))
    ledger.issue(2, range(4, 8))
    ledger.generated(2, [5])
    ledger.trained(1, [0, 2])
    ledger.dropped(1, [3], "environment failed")
    assert (ledger.open(1), ledger.open(2), ledger.open(3)) == ([1], [4, 5, 6, 7], [])
    assert ledger.open_steps() == [1, 2]


def test_a_reader_reads_on_where_it_was(ledger: Ledger) -> None:
    one_step(ledger, 1, range(4))
    reader = Ledger(ledger.path)
    ledger.issue(2, range(4, 8))
    with ledger.path.open("ab") as file:
        file.write(b'{"step": 2, "gen')  # a line that is being written
    assert reader.read_on()
    assert reader.audit() == ledger.audit()
    ledger.generated(2, range(4, 8))
    assert reader.read_on()
    assert reader.audit() == Ledger(ledger.path).audit()
    ledger.restore(ledger.snapshot(), 2)  # a run that resumes
    assert not reader.read_on()


def test_the_audit_counts(ledger: Ledger) -> None:
    one_step(ledger, 1, range(8))
    ledger.issue(2, range(8, 16))
    ledger.issue(2, range(8, 12))
    ledger.dropped(2, [8, 9], "equal rewards")
    ledger.dropped(2, [10], "environment failed")
    ledger.trained(2, range(11, 15))
    audit = ledger.audit()
    assert (audit.issued, audit.trained, audit.trained_steps, audit.open, audit.reissued) == (16, 12, 2, 1, 4)
    assert audit.dropped == {"equal rewards": 2, "environment failed": 1}
    assert audit.clean


def test_an_open_prompt_may_be_issued_for_a_later_step_instead(ledger: Ledger) -> None:
    ledger.issue(1, [0])
    ledger.issue(2, [0])
    assert (ledger.open(1), ledger.open(2)) == ([], [0])
    ledger.trained(2, [0])
    assert ledger.audit().clean
    assert ledger.audit().reissued == 1


# --- what may not happen


def test_a_prompt_is_not_trained_a_second_time(ledger: Ledger) -> None:
    one_step(ledger, 1, range(8))
    ledger.issue(2, range(8, 16))
    before = ledger.path.read_bytes()
    with pytest.raises(RunError, match="step 2: prompts 3-4 would be trained a second time"):
        ledger.trained(2, [3, 4, 8])
    assert ledger.path.read_bytes() == before
    assert ledger.open(2) == list(range(8, 16))
    with pytest.raises(RunError):
        Ledger(ledger.path).trained(2, [0])


FAULTS: dict[str, tuple[Callable[[Ledger], None], str]] = {
    "unissued": (lambda ledger: ledger.trained(2, [8]), "step 2: prompt 8 trained without being issued"),
    "other step": (
        lambda ledger: (ledger.issue(2, [8, 9]), ledger.trained(3, [8, 9]))[0],
        "step 3: prompts 8-9 trained, but issued for another step",
    ),
    "dropped after": (lambda ledger: ledger.dropped(2, [3], "x"), "step 2: prompt 3 dropped after being trained"),
    "issued after": (lambda ledger: ledger.issue(2, [3]), "step 2: prompt 3 issued again after being trained"),
    "trained after dropped": (
        lambda ledger: (ledger.issue(2, [8]), ledger.dropped(2, [8], "x"), ledger.trained(2, [8]))[0],
        "step 2: prompt 8 trained after being dropped",
    ),
    "issued after dropped": (
        lambda ledger: (ledger.issue(2, [8]), ledger.dropped(2, [8], "x"), ledger.issue(3, [8]))[0],
        "step 3: prompt 8 issued again after being dropped",
    ),
    "dropped twice": (
        lambda ledger: (ledger.issue(2, [8]), ledger.dropped(2, [8], "x"), ledger.dropped(2, [8], "x"))[0],
        "step 2: prompt 8 dropped twice",
    ),
    "dropped unissued": (lambda ledger: ledger.dropped(2, [8], "x"), "step 2: prompt 8 dropped without being issued"),
    "generated unissued": (
        lambda ledger: (ledger.generated(2, [8]), ledger.issue(2, [8]))[0],
        "step 2: prompt 8 generated without being issued",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_add_up_is_a_problem_that_survives_reading_and_snapshots(ledger: Ledger, fault: str) -> None:
    commit, problem = FAULTS[fault]
    one_step(ledger, 1, range(8))
    commit(ledger)
    assert ledger.audit().problems == (problem,)
    assert not ledger.audit().clean
    assert Ledger(ledger.path).audit() == ledger.audit()
    restored = Ledger(ledger.path)
    restored.restore(ledger.snapshot(), 3)
    assert restored.audit() == ledger.audit()


def test_a_second_training_that_is_in_the_file_is_found(ledger: Ledger) -> None:
    one_step(ledger, 1, range(8))
    assert append(ledger, {"step": 2, "trained": "3-4"}).audit().problems == ("step 2: prompts 3-4 trained twice",)


def test_a_prompt_that_was_skipped_is_a_gap(ledger: Ledger) -> None:
    ledger.issue(1, [0, 1, 4])
    assert ledger.audit().gaps == (2, 3)
    assert not ledger.audit().clean


# --- going on


def test_a_line_torn_by_a_kill_is_overwritten(ledger: Ledger) -> None:
    one_step(ledger, 1, range(2))
    with ledger.path.open("a") as file:
        file.write('{"step": 2, "iss')
    torn = ledger.path.read_bytes()
    again = Ledger(ledger.path)
    assert again.audit() == ledger.audit()
    assert ledger.path.read_bytes() == torn, "reading changes nothing"
    again.issue(2, range(2, 4))
    assert Ledger(ledger.path).open(2) == [2, 3]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from pathlib import Path
from corral.observe.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
ledger.issue(1, [0])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.RLIM_INFINITY))
try:
    ledger.trained(1, [0])
except OSError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert error.filename == sys.argv[1]
    assert ledger.open(1) == [0]
    ledger.dropped(1, [0], "equal rewards")
"""
    path = tmp_path / "ledger.jsonl"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=within(30))
    assert Ledger(path).audit().dropped == {"equal rewards": 1}


def test_a_file_that_someone_else_shortened_is_not_written_to(ledger: Ledger) -> None:
    ledger.issue(1, range(8))
    ledger.path.write_text("")
    with pytest.raises(RunError, match="something else has changed it"):
        ledger.trained(1, range(8))


@pytest.mark.parametrize(
    "line",
    [
        *(
            "nonsense",
            "[1]",
            "{}",
            '{"step": 2}',
            '{"issued": "1"}',
            '{"step": 1, "issued": "3-1"}',
            '{"prompts": "1"}',
        ),
        *('{"step": 1, "issued": "0-99999999999"}', "[" * 100_000),
    ],
    ids=lambda line: line[:40],
)
def test_a_line_that_cannot_be_read_is_an_error_with_its_number(ledger: Ledger, line: str) -> None:
    ledger.issue(1, [0])
    with ledger.path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=r"ledger\.jsonl, line 2 is not a line of a ledger"):
        Ledger(ledger.path)


def test_what_happened_after_the_checkpoint_is_forgotten_and_what_was_open_stays_open(ledger: Ledger) -> None:
    one_step(ledger, 1, range(4))
    ledger.issue(2, range(4, 8))
    ledger.generated(2, [4, 5])
    saved = ledger.snapshot()
    ledger.trained(2, range(4, 8))
    one_step(ledger, 3, range(8, 12))
    again = Ledger(ledger.path)
    again.restore(saved, 1)
    assert again.open_steps() == [2]
    assert again.open(2) == [4, 5, 6, 7]
    one_step(again, 2, range(4, 8))
    one_step(again, 3, range(8, 12))
    audit = again.audit()
    assert audit.clean
    assert (audit.issued, audit.trained, audit.reissued) == (12, 12, 4)


def test_a_snapshot_has_one_line_for_prompts_with_the_same_fate(ledger: Ledger) -> None:
    for step in range(1, 4):
        ledger.issue(step, range(8 * step - 8, 8 * step))
        for prompt_id in range(8 * step - 8, 8 * step):
            ledger.generated(step, [prompt_id])
        ledger.trained(step, range(8 * step - 8, 8 * step))
    assert [json.loads(line) for line in ledger.snapshot().splitlines()] == [
        {"prompts": f"{8 * step - 8}-{8 * step - 1}", "are": "trained", "times": 1, "issued_for": step, "step": step}
        for step in range(1, 4)
    ]


def test_a_snapshot_of_a_snapshot_is_the_same(ledger: Ledger) -> None:
    one_step(ledger, 1, range(4))
    ledger.issue(2, range(4, 9))
    ledger.generated(2, [5])
    ledger.dropped(2, [4, 8], "equal rewards")
    saved = ledger.snapshot()
    ledger.restore(saved, 1)
    assert ledger.snapshot() == saved
    assert ledger.path.read_text() == saved


def test_an_empty_ledger_has_an_empty_snapshot(ledger: Ledger) -> None:
    assert ledger.snapshot() == ""
    ledger.restore("", 0)
    assert ledger.audit().clean


def test_a_run_without_a_checkpoint_begins_anew(ledger: Ledger) -> None:
    one_step(ledger, 1, range(4))
    ledger.restore(None, 0)
    assert ledger.audit().issued == 0
    one_step(ledger, 1, range(4))
    assert ledger.audit().clean


def test_a_checkpoint_from_before_there_were_ledgers_leaves_no_gap(ledger: Ledger) -> None:
    ledger.restore(None, 10)
    one_step(ledger, 11, range(80, 88))
    ledger.issue(12, range(88, 90))
    again = Ledger(ledger.path)
    again.restore(ledger.snapshot(), 11)
    assert again.audit().clean
    again.issue(12, [91])
    assert again.audit().gaps == (90,)


def test_a_snapshot_that_knows_more_than_the_weights_is_refused(ledger: Ledger) -> None:
    one_step(ledger, 1, range(4))
    one_step(ledger, 2, range(4, 8))
    before = ledger.path.read_bytes()
    with pytest.raises(RunError, match="prompts 4-7 were trained after that step"):
        ledger.restore(ledger.snapshot(), 1)
    assert ledger.path.read_bytes() == before


def test_a_snapshot_that_does_not_end_where_the_sampler_is_is_refused(ledger: Ledger) -> None:
    one_step(ledger, 1, range(4))
    ledger.restore(ledger.snapshot(), 1, next_prompt_id=4)
    for next_prompt_id in (0, 3, 10**12):
        with pytest.raises(RunError, match=f"has 4 prompts, and by its state.json {next_prompt_id} were handed out"):
            ledger.restore(ledger.snapshot(), 1, next_prompt_id)


# --- any history


@dataclass
class Checkpoint:
    step: int
    next_prompt_id: int
    ledger: str


@dataclass
class Simulation:
    """A run that draws ahead, drops, saves, crashes and goes on, and what truly reached its weights."""

    path: Path
    random: random.Random
    step: int = 0
    next_prompt_id: int = 0
    prompts: dict[int, list[int]] = field(default_factory=dict)
    """On their way, by the step they are for."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    fates: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.path)

    def issue(self) -> None:
        step = max([self.step, *self.prompts]) + 1
        if step <= self.step + 3:
            self.prompts[step] = list(range(self.next_prompt_id, self.next_prompt_id + self.random.randint(1, 6)))
            self.next_prompt_id = self.prompts[step][-1] + 1
            self.ledger.issue(step, self.prompts[step])

    def generate(self) -> None:
        for step, prompt_ids in self.prompts.items():
            self.ledger.generated(step, [prompt_id for prompt_id in prompt_ids if self.random.random() < 0.5])

    def lose_a_worker(self) -> None:
        for step in self.ledger.open_steps():
            self.ledger.issue(step, self.ledger.open(step))

    def train(self) -> None:
        if self.step + 1 in self.prompts:
            self.step += 1
            prompt_ids = self.prompts.pop(self.step)
            dull = [prompt_id for prompt_id in prompt_ids if self.random.random() < 0.3]
            self.ledger.dropped(self.step, dull, "equal rewards")
            self.ledger.trained(self.step, set(prompt_ids) - set(dull))
            for prompt_id in prompt_ids:
                self.fates.setdefault(prompt_id, []).append("dropped" if prompt_id in dull else "trained")

    def save(self) -> None:
        self.checkpoints.append(Checkpoint(self.step, self.next_prompt_id, self.ledger.snapshot()))

    def crash(self) -> None:
        if self.path.exists() and self.random.random() < 0.5:
            with self.path.open("ab") as file:
                file.write(b'{"step": 1, "trai')
        self.ledger = Ledger(self.path)
        kept = self.random.randint(0, len(self.checkpoints))
        del self.checkpoints[kept:]
        if kept == 0:
            self.ledger.restore(None, 0)
            self.step = self.next_prompt_id = 0
        else:
            last = self.checkpoints[-1]
            self.ledger.restore(last.ledger, last.step)
            self.step, self.next_prompt_id = last.step, last.next_prompt_id
        self.prompts = {step: self.ledger.open(step) for step in self.ledger.open_steps()}
        self.lose_a_worker()
        done = self.next_prompt_id, {prompt_id for prompt_ids in self.prompts.values() for prompt_id in prompt_ids}
        self.fates = {o: fates for o, fates in self.fates.items() if o < done[0] and o not in done[1]}

    def finish(self) -> None:
        while self.prompts:
            self.train()


ACTIONS = ("issue", "issue", "issue", "generate", "train", "train", "save", "crash", "lose_a_worker")


def simulate(folder: Path, seed: int, actions: list[str]) -> Simulation:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    simulation = Simulation(folder / "ledger.jsonl", random.Random(seed))
    for action in actions:
        getattr(simulation, action)()
        assert simulation.ledger.audit().clean
        assert Ledger(simulation.path).audit() == simulation.ledger.audit()
    simulation.finish()
    return simulation


histories = st.lists(st.sampled_from(ACTIONS), max_size=40)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), actions=histories)
@pytest.mark.slow
def test_after_any_crashes_every_prompt_was_trained_once_or_dropped(
    tmp_path_factory: pytest.TempPathFactory, seed: int, actions: list[str]
) -> None:
    simulation = simulate(tmp_path_factory.getbasetemp() / "history", seed, actions)
    audit = Ledger(simulation.path).audit()
    assert audit.clean
    assert audit.open == 0
    assert sorted(simulation.fates) == list(range(simulation.next_prompt_id))
    assert all(len(fates) == 1 for fates in simulation.fates.values())
    assert audit.trained == sum(fates == ["trained"] for fates in simulation.fates.values())
    assert sum(audit.dropped.values()) == sum(fates == ["dropped"] for fates in simulation.fates.values())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), actions=histories, fault=st.sampled_from(["again", "lost", "unissued", "elsewhere"]))
def test_a_single_prompt_that_was_not_trained_once_makes_any_history_unclean(
    tmp_path_factory: pytest.TempPathFactory, seed: int, actions: list[str], fault: str
) -> None:
    simulation = simulate(tmp_path_factory.getbasetemp() / "fault", seed, ["issue", "train", *actions])
    one_step(simulation.ledger, simulation.step + 1, range(simulation.next_prompt_id, simulation.next_prompt_id + 2))
    ledger, step, following = simulation.ledger, simulation.step + 2, simulation.next_prompt_id + 2
    assert ledger.audit().clean
    if fault == "again":
        ledger = append(ledger, {"step": step, "trained": str(simulation.random.randint(following - 2, following - 1))})
    elif fault == "lost":
        ledger.issue(step, [following + 1])
    elif fault == "unissued":
        ledger.trained(step, [following])
    else:
        ledger.issue(step, [following])
        ledger.trained(step + 1, [following])
    assert not ledger.audit().clean
    ledger.restore(ledger.snapshot(), step + 1)
    assert not ledger.audit().clean


@settings(max_examples=60)
@given(st.sets(st.integers(0, 60), min_size=1))
def test_spans_are_read_back(prompt_ids: set[int]) -> None:
    text = format_spans(np.array(sorted(prompt_ids)))
    assert prompt_ids_in(parse_spans(text)).tolist() == sorted(prompt_ids)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,1", "2,1", "1-3,2", "-1", "1-"])
def test_other_text_is_not_spans(text: str) -> None:
    with pytest.raises(ValueError):
        parse_spans(text)


def test_a_long_run_takes_little_space(ledger: Ledger) -> None:
    for step in range(1, 101):
        one_step(ledger, step, range(1024 * (step - 1), 1024 * step))
    assert ledger.path.stat().st_size < 20_000
    assert len(ledger.snapshot()) < 10_000
    assert Ledger(ledger.path).audit().trained == 102_400


# --- as a user asks


def test_the_command_prints_what_happened_to_the_prompts(tmp_path: Path, ledger: Ledger) -> None:
    one_step(ledger, 1, range(8))
    ledger.issue(2, range(8, 16))
    ledger.dropped(2, [9, 10], "equal rewards")
    finished = corral(tmp_path, "ledger", ".")
    assert finished.code == 0, finished.stderr
    assert finished.stdout.splitlines() == [
        "issued   16",
        "trained   8 in 1 step",
        "dropped   2 (equal rewards: 2)",
        "open      6",
        "clean",
    ]


def test_the_command_fails_for_a_ledger_that_does_not_add_up(tmp_path: Path, ledger: Ledger) -> None:
    ledger.issue(1, [0, 2])
    ledger.trained(2, [2])
    finished = corral(tmp_path, "ledger", ".")
    assert finished.code == 1
    assert finished.stderr == ""
    assert finished.stdout.splitlines()[-3:] == [
        "gap      prompt 1: never issued, though later ones were",
        "problem  step 2: prompt 2 trained, but issued for another step",
        "not clean",
    ]


def test_the_command_for_programs(tmp_path: Path, ledger: Ledger) -> None:
    one_step(ledger, 1, range(8))
    answer = json.loads(corral(tmp_path, "ledger", ".", "--json").stdout)
    assert answer == {
        "issued": 8,
        "trained": 8,
        "trained_steps": 1,
        "dropped": {},
        "open": 0,
        "reissued": 0,
        "gaps": [],
        "problems": [],
        "clean": True,
    }


def test_the_command_prints_the_history_of_one_prompt(tmp_path: Path, ledger: Ledger) -> None:
    ledger.issue(1, range(4))
    ledger.issue(1, range(4))
    ledger.restore(ledger.snapshot(), 0)
    ledger.issue(1, range(4))
    ledger.generated(1, range(4))
    ledger.trained(1, [0, 1, 2])
    ledger.dropped(1, [3], "equal rewards")
    lines = ["issued for step 1, 2 times", "issued for step 1", "generated for step 1"]
    assert ledger.history_of(2) == [*lines, "trained at step 1"]
    ledger.restore(ledger.snapshot(), 1)
    assert ledger.history_of(3) == ["issued for step 1, 3 times", "dropped at step 1: equal rewards"]
    printed = corral(tmp_path, "ledger", ".", "--prompt", "3")
    assert printed.stdout.splitlines() == ["prompt 3", *(f"  {line}" for line in ledger.history_of(3))]
    assert corral(tmp_path, "ledger", ".", "--prompt", "9").stdout == "prompt 9\n  was never issued\n"
    answer = json.loads(corral(tmp_path, "ledger", ".", "--prompt", "9", "--json").stdout)
    assert answer == {"prompt": 9, "history": []}


def test_a_folder_without_a_ledger_is_an_error(tmp_path: Path) -> None:
    finished = corral(tmp_path, "ledger", ".")
    assert finished.code == 2
    assert finished.errors == ["error: . has no ledger.jsonl; is it the folder of a run?"]


def test_a_ledger_of_version_0_5_is_read(ledger: Ledger) -> None:
    append(ledger, {"prompts": "0-1", "are": "played", "times": 1, "issued_for": 1})
    append(ledger, {"step": 2, "issued": "2-3"})
    old = append(ledger, {"step": 2, "played": "2-3"})
    assert (old.audit().clean, old.open(1), old.open(2)) == (True, [0, 1], [2, 3])
    assert old.history_of(2) == ["issued for step 2", "generated for step 2"]
