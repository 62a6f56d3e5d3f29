"""The driver, with a real engine and people's own environments: what it records, and what a bad one costs."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deadlines import within
from tiny import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM

from corral.data.batch import StopReason, Trajectory
from corral.data.plugins import load_object
from corral.data.rows import Message, Row
from corral.data.sources import render_prompt
from corral.envs.base import EnvSet
from corral.model.attention import register
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment, Reward
from corral.recipe.schema import Rollout as RolloutSettings
from corral.rollout.chat_rendering import ChatRenderer
from corral.rollout.driver import Prompt, RolloutDriver
from corral.rollout.engine import Sampling
from corral.rollout.native_engine import NativeEngine

ENVIRONMENTS = '''
import asyncio
import sys

from corral.envs.base import StepResult
from corral.recipe.errors import UserError


class Base:
    async def reset(self, row, seed):
        return row.prompt

    async def step(self, reply):
        return StepResult([], 1.0, done=True)

    async def close(self):
        pass


class Plain(Base):
    pass


class TwoTurns(Base):
    """Asks back once; what it was told is in its metrics."""

    async def reset(self, row, seed):
        self.replies = []
        return [*row.prompt[:-1], {"role": "user", "content": "Say something."}]

    async def step(self, reply):
        self.replies.append(reply)
        if len(self.replies) == 1:
            return StepResult([{"role": "user", "content": "And again?"}], 0.25, done=False, metrics={"turns": 1})
        return StepResult([], 0.5, done=True, metrics={"turns": 1, "length": len("".join(self.replies))})


class EndlessTalk(Base):
    async def step(self, reply):
        return StepResult([{"role": "user", "content": "Go on."}], 0.125, done=False)


class LongTalk(Base):
    async def step(self, reply):
        return StepResult([{"role": "user", "content": "blah " * 30}], 0.125, done=False)


class Raises(Base):
    async def step(self, reply):
        raise ValueError("no such thing\\nas an answer")


class RaisesInReset(Base):
    async def reset(self, row, seed):
        raise ValueError("no game today")


class OpensWithText(Base):
    async def reset(self, row, seed):
        return "Hello"


class RaisesInClose(Base):
    async def close(self):
        raise ValueError("cannot let go")


class CannotBeMade(Base):
    def __init__(self):
        raise ValueError("no more licences")


class RaisesLate(TwoTurns):
    async def step(self, reply):
        if self.replies:
            raise ValueError("too much")
        return await super().step(reply)


class Hangs(Base):
    async def step(self, reply):
        await asyncio.sleep(3600)


class HangsInReset(Base):
    async def reset(self, row, seed):
        await asyncio.sleep(3600)


class IgnoresCancellation(Base):
    async def step(self, reply):
        for _ in range(4):
            try:
                await asyncio.sleep(0.5)
            except asyncio.CancelledError:
                pass


class Exits(Base):
    async def step(self, reply):
        sys.exit(3)


class ExitsOnItsOwn(Exits):
    bounds_itself = True


class TakesItsTime(Base):
    bounds_itself = True

    async def step(self, reply):
        await asyncio.sleep(0.5)
        return StepResult([], 1.0, done=True)


class NeverEnds(Base):
    bounds_itself = True
    num_begun, ended = 0, []

    async def step(self, reply):
        NeverEnds.num_begun += 1
        try:
            await asyncio.sleep(3600)
        finally:
            NeverEnds.ended.append("step")

    async def close(self):
        NeverEnds.ended.append("close")


class ReturnsNothing(Base):
    async def step(self, reply):
        pass


class RewardIsNaN(Base):
    async def step(self, reply):
        return StepResult([], float("nan"), done=True)


class Inline(Base):
    """Speaks within the model's own turn."""

    inline = True
    last_turns = 1

    async def step(self, reply):
        content = "<info>" + "blah " * 2 + "</info>"
        return StepResult([{"role": "user", "content": content}], 0.0, False, closing="</info>")

    def summary(self):
        return {"seen": 1.0}


class Counted(Base):
    at_once = most = 0

    async def reset(self, row, seed):
        Counted.at_once += 1
        Counted.most = max(Counted.most, Counted.at_once)
        return row.prompt

    async def close(self):
        Counted.at_once -= 1


class Wanders(Base):
    """Says where the model is: in one of two places, whatever it is told."""

    def __init__(self):
        self.turn = 0

    async def step(self, reply):
        self.turn += 1
        return StepResult([{"role": "user", "content": f"{self.turn}."}], 0.0, False, state="ab"[self.turn % 2])


class BadMessages(Base):
    async def step(self, reply):
        return StepResult(["hello"], 0.0, done=False)


class LongOpening(Base):
    async def reset(self, row, seed):
        return [{"role": "user", "content": "blah " * 30}]


class FailsEarlyAndGoesOn(TwoTurns):
    async def step(self, reply):
        result = await super().step(reply)
        error = None if result.done else "the tool was down"
        return StepResult(result.messages, result.reward, result.done, result.metrics, error)


class Moody(Base):
    """Fails for every other sample."""

    made = 0

    def __init__(self):
        Moody.made += 1
        self.bad = Moody.made % 2 == 0

    async def step(self, reply):
        if self.bad:
            raise ValueError("not today")
        return StepResult([], 1.0, done=True)


class FirstIsWrong(Base):
    """Ends the run with its first sample, while the others are in their step."""

    bounds_itself = True
    made = 0

    def __init__(self):
        FirstIsWrong.made += 1
        self.is_wrong = FirstIsWrong.made == 1

    async def step(self, reply):
        if self.is_wrong:
            raise UserError("the template is wrong")
        await asyncio.sleep(3600)
'''
BUDGET = 40


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(), attn_implementation="corral").eval()
    engine = NativeEngine(model, tiny_tokenizer(), max_sequences=8, max_prefill_tokens=512, max_length=400)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("environments") / "games.py"
    file.write_text(ENVIRONMENTS)
    return file


@pytest.fixture
def rollout(engine: NativeEngine, environments: Path) -> "Rollout":
    return Rollout(engine, environments)


class Rollout:
    def __init__(self, engine: NativeEngine, environments: Path) -> None:
        self.engine, self.environments = engine, environments
        self.tokenizer = engine.tokenizer
        self.num_tasks_left = 0

    def __call__(
        self,
        name: str,
        *,
        prompts: int = 1,
        samples: int = 1,
        max_turns: int = 2,
        max_tokens: int = 5,
        template: str | None = None,
        max_turn_tokens: int | None = None,
        max_observation_tokens: int | None = None,
        budget: int = BUDGET,
        is_over: Callable[[], bool] | None = None,
        **more: Any,
    ) -> list[Trajectory]:
        """Every turn has up to `max_tokens` tokens; the end-of-turn token is as likely as any other. `is_over`: when
        the rollout is cancelled."""
        environment = Environment(
            name=f"{self.environments}:{name}", timeout_s=0.3, reward=Reward(on_error=-1.0), **more
        )
        chat_tokenizer = tiny_tokenizer()
        if template is not None:
            chat_tokenizer.chat_template = template
        driver = RolloutDriver(
            engine=self.engine,
            envs=EnvSet({"": environment}, {}, RolloutSettings()),
            chat=ChatRenderer(chat_tokenizer, True),
            max_turns=max_turns,
            max_prompt_tokens=60,
            max_response_tokens=budget,
            seed=7,
            max_turn_tokens=max_turn_tokens,
            max_observation_tokens=max_observation_tokens,
        )
        row = Row([Message(role="user", content="Hello?")], None, "", {})
        prompt = Prompt(3, 0, row, render_prompt(self.tokenizer, row, True))
        sampling = Sampling(max_tokens=max_tokens, stop_tokens=frozenset({self.tokenizer.eos_token_id}))

        async def run() -> list[Trajectory]:
            rolling = asyncio.ensure_future(driver.roll_out([prompt] * prompts, samples, sampling))
            while is_over is not None and not (is_over() or rolling.done()):
                await asyncio.sleep(0.001)  # not 0: a loop that spins takes the GIL from the engine
            if is_over is not None:
                rolling.cancel()
            try:
                return await rolling
            finally:
                self.num_tasks_left = len(asyncio.all_tasks()) - 1

        return asyncio.run(run())

    def text(self, tokens: np.ndarray) -> str:
        return str(self.tokenizer.decode(tokens))


def turns(trajectory: Trajectory) -> list[tuple[bool, list[int]]]:
    """Runs of tokens that were, or were not, generated."""
    edges = np.flatnonzero(np.diff(trajectory.generated)) + 1
    spans = np.split(np.arange(len(trajectory.tokens)), edges)
    return [(bool(trajectory.generated[span[0]]), trajectory.tokens[span].tolist()) for span in spans]


def test_a_two_turn_conversation_is_recorded_token_by_token(rollout: Rollout) -> None:
    for trajectory in rollout("TwoTurns", samples=8):
        (_, opening), (_, first), (_, observation), (_, second) = turns(trajectory)
        assert [generated for generated, _ in turns(trajectory)] == [False, True, False, True]
        assert rollout.text(np.array(opening)) == "<|start|>user\nSay something.<|end|>\n<|start|>assistant\n"
        ended = first[-1] == rollout.tokenizer.eos_token_id
        following = "\n<|start|>user\nAnd again?<|end|>\n<|start|>assistant\n"
        assert rollout.text(np.array(observation)) == ("" if ended else "<|end|>") + following
        last_of_first = len(opening) + len(first) - 1
        assert trajectory.turn_rewards == [(last_of_first, 0.25), (len(trajectory.tokens) - 1, 0.5)]
        assert trajectory.generated[last_of_first]
        assert trajectory.generated[-1]
        assert trajectory.reward == 0.75
        replies = (
            rollout.tokenizer.decode(first, skip_special_tokens=True),
            rollout.tokenizer.decode(second, skip_special_tokens=True),
        )
        assert trajectory.metrics == {"turns": 2, "length": len("".join(replies))}
        assert trajectory.error is None


def test_only_what_was_generated_has_log_probs_and_versions(rollout: Rollout) -> None:
    for trajectory in rollout("TwoTurns", samples=4):
        assert (trajectory.logprobs[trajectory.generated] < 0).all()
        assert (trajectory.logprobs[~trajectory.generated] == 0).all()
        assert (trajectory.versions[trajectory.generated] == 0).all()
        assert (trajectory.versions[~trajectory.generated] == -1).all()


def test_a_conversation_is_what_the_template_would_render(rollout: Rollout) -> None:
    """Extended token by token, and yet the same as rendered at once."""
    for trajectory in rollout("TwoTurns", samples=8):
        (_, _), (_, first), (_, _), (_, second) = turns(trajectory)
        if {rollout.tokenizer.eos_token_id, 0, 1} & {*first[:-1], *second[:-1]}:
            continue  # special tokens in the middle of a reply cannot be written as text
        replies = [rollout.tokenizer.decode(reply, skip_special_tokens=True) for reply in (first, second)]
        messages = [
            {"role": "user", "content": "Say something."},
            {"role": "assistant", "content": replies[0]},
            {"role": "user", "content": "And again?"},
        ]
        rendered = rollout.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert rollout.text(trajectory.tokens[: -len(second)]) == rendered


def test_samples_of_a_prompt_differ_and_are_the_same_again(rollout: Rollout) -> None:
    first, again = rollout("TwoTurns", samples=4), rollout("TwoTurns", samples=4)
    assert [t.tokens.tolist() for t in first] == [t.tokens.tolist() for t in again]
    assert len({tuple(t.tokens) for t in first}) == 4
    assert [(t.prompt_id, t.sample) for t in first] == [(3, 0), (3, 1), (3, 2), (3, 3)]


def test_a_conversation_ends_after_max_turns(rollout: Rollout) -> None:
    [trajectory] = rollout("EndlessTalk", max_turns=2, max_tokens=3)
    assert trajectory.stop is StopReason.TURNS
    assert [reward for _, reward in trajectory.turn_rewards] == [0.125, 0.125]
    assert trajectory.generated[-1]  # nothing is observed after the last turn


@pytest.mark.parametrize("name", ["EndlessTalk", "LongTalk"])
def test_a_conversation_never_passes_its_budget_of_tokens(rollout: Rollout, name: str) -> None:
    for trajectory in rollout(name, samples=4, max_turns=50, max_tokens=4):
        assert trajectory.stop is StopReason.LENGTH
        assert len(trajectory.tokens) - trajectory.prompt_length <= BUDGET
        assert trajectory.generated[-1]
        assert trajectory.error is None


def test_an_observation_after_which_no_token_could_be_generated_is_left_out(rollout: Rollout) -> None:
    [whole] = rollout("TwoTurns")
    (_, _), (_, first), (_, observation), (_, _) = turns(whole)
    [cut] = rollout("TwoTurns", budget=len(first) + len(observation))
    assert cut.stop is StopReason.LENGTH
    assert turns(cut) == turns(whole)[:2]
    [longer] = rollout("TwoTurns", budget=len(first) + len(observation) + 1)
    assert longer.num_generated == len(first) + 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Raises", "step: ValueError: no such thing as an answer (games.py:"),
        ("Hangs", "step: no answer within 0.3 s"),
        ("IgnoresCancellation", "step: no answer within 0.3 s"),
        ("Exits", "step: RuntimeError: it called sys.exit(3)"),
        ("ExitsOnItsOwn", "step: RuntimeError: it called sys.exit(3)"),
        ("ReturnsNothing", "step: TypeError: it returned None, which is not a StepResult (games.py:"),
        ("RewardIsNaN", "step: ValueError: the reward must be finite; it is nan"),
        ("BadMessages", "step: "),
    ],
)
def test_an_environment_that_fails_costs_its_trajectory_and_a_bounded_time(
    rollout: Rollout, name: str, expected: str
) -> None:
    started = time.monotonic()
    for trajectory in rollout(name, samples=3):
        assert trajectory.stop is StopReason.ERROR
        assert trajectory.error is not None
        assert trajectory.error.startswith(expected)
        assert "\n" not in trajectory.error
        assert trajectory.reward == -1.0
        assert trajectory.num_generated > 0
    assert time.monotonic() - started < within(10)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RaisesInReset", "reset: ValueError: no game today (games.py:"),
        ("OpensWithText", "reset: TypeError: it returned 'Hello', which is not a list of messages (games.py:"),
        ("HangsInReset", "reset: no answer within 0.3 s"),
        ("CannotBeMade", "reset: ValueError: no more licences"),
        ("LongOpening", "reset: ValueError: 169 tokens are more than data.max_prompt_tokens: 60"),
    ],
)
def test_an_environment_that_fails_at_reset_leaves_nothing_to_train_on(
    rollout: Rollout, name: str, expected: str
) -> None:
    [trajectory] = rollout(name)
    assert trajectory.stop is StopReason.ERROR
    assert trajectory.error is not None
    assert trajectory.error.startswith(expected)
    assert trajectory.num_generated == 0


def test_an_environment_that_bounds_itself_has_no_deadline(rollout: Rollout) -> None:
    for trajectory in rollout("TakesItsTime", samples=3):
        assert trajectory.error is None
        assert trajectory.reward == 1.0


def test_when_a_rollout_is_cancelled_steps_end_and_environments_are_closed(rollout: Rollout) -> None:
    never_ends = load_object(f"{rollout.environments}:NeverEnds", "environment")
    with pytest.raises(asyncio.CancelledError):
        rollout("NeverEnds", samples=3, is_over=lambda: never_ends.num_begun == 3)
    assert sorted(never_ends.ended) == ["close"] * 3 + ["step"] * 3


def test_when_one_trajectory_ends_the_run_all_others_have_ended_before_it_is_reported(rollout: Rollout) -> None:
    with pytest.raises(UserError, match="the template is wrong"):
        rollout("FirstIsWrong", prompts=2, samples=2)
    assert rollout.num_tasks_left == 0


def test_an_environment_that_fails_late_keeps_what_was_earned_before(rollout: Rollout) -> None:
    [trajectory] = rollout("RaisesLate")
    assert [reward for _, reward in trajectory.turn_rewards] == [0.25, -1.0]
    assert trajectory.stop is StopReason.ERROR


def test_an_environment_that_fails_to_close_still_gives_its_trajectory(rollout: Rollout) -> None:
    [trajectory] = rollout("RaisesInClose")
    assert trajectory.reward == 1.0
    assert trajectory.error is not None
    assert trajectory.error.startswith("close: ValueError: cannot let go")


def test_an_error_that_the_environment_reports_is_not_forgotten_in_the_next_turn(rollout: Rollout) -> None:
    [trajectory] = rollout("FailsEarlyAndGoesOn")
    assert trajectory.error == "the tool was down"
    assert trajectory.reward == 0.75


def test_one_bad_environment_does_not_touch_the_others(rollout: Rollout) -> None:
    trajectories = rollout("Moody", samples=6)
    assert [trajectory.error is None for trajectory in trajectories] == [True, False] * 3
    plain = rollout("Plain", samples=6)
    assert [t.tokens.tolist() for t in trajectories] == [t.tokens.tolist() for t in plain]


FORGETFUL = (
    "{% for message in messages %}{% if loop.last or message['role'] == 'user' %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>\n{% endif %}{% endfor %}<|start|>assistant\n"
)
WITHOUT_END = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [(FORGETFUL, "changes earlier turns"), (WITHOUT_END, re.escape("does not end a turn with <|end|>"))],
)
def test_a_template_that_cannot_be_extended_is_refused(rollout: Rollout, template: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        rollout("TwoTurns", template=template)


def test_an_inline_observation_continues_the_models_own_turn_unless_it_was_closed(rollout: Rollout) -> None:
    inline, as_message = 0, 0
    for trajectory in rollout("Inline", samples=8, max_turns=1, max_tokens=3, budget=80):
        (_, _), (_, first), (_, observation), (_, _) = turns(trajectory)
        text = rollout.text(np.array(observation))
        if first[-1] == rollout.tokenizer.eos_token_id:
            as_message += 1
            assert text.startswith("\n<|start|>user\n<info>bl")
        else:
            inline += 1
            assert text == "<info>blah blah </info>"
    assert inline
    assert as_message + inline == 8


def test_last_turns_come_on_top_and_the_summary_is_taken_after_them(rollout: Rollout) -> None:
    [trajectory] = rollout("Inline", max_turns=1, max_tokens=2)
    assert len(trajectory.turn_rewards) == 2
    assert trajectory.stop is StopReason.TURNS
    assert trajectory.metrics["seen"] == 1.0


def test_a_turn_has_its_own_limit_of_tokens(rollout: Rollout) -> None:
    for trajectory in rollout("TwoTurns", samples=4, max_tokens=30, max_turn_tokens=2):
        assert all(len(tokens) <= 2 for generated, tokens in turns(trajectory) if generated)


def test_a_long_observation_is_cut_and_keeps_its_closing_tag(rollout: Rollout) -> None:
    for trajectory in rollout("Inline", samples=8, max_tokens=2, max_turns=1, max_observation_tokens=15, budget=80):
        (_, _), (_, first), (_, observation), (_, _) = turns(trajectory)
        assert trajectory.metrics["cut_observations"] == 1.0
        if first[-1] != rollout.tokenizer.eos_token_id:
            assert rollout.text(np.array(observation)) == "<info>bl</info>"


def test_no_more_environments_are_open_than_the_recipe_allows(rollout: Rollout) -> None:
    trajectories = rollout("Counted", samples=7, concurrency=2)
    assert len(trajectories) == 7
    assert all(trajectory.error is None for trajectory in trajectories)
    assert load_object(f"{rollout.environments}:Counted", "environment").most == 2


def test_states_are_numbered_by_what_the_environment_says_they_are(rollout: Rollout) -> None:
    [trajectory] = rollout("Wanders", max_turns=5, max_tokens=1, budget=300)
    begin, *later = trajectory.turn_states
    assert begin not in later
    assert later[0] == later[2] != later[1] == later[3]
