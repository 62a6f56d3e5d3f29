"""On-policy distillation: the policy becomes its teacher, which may have another size but must have the same tokens."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from runs import steps_here
from served import running
from tiny import save_tiny_model, tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM

from corral.algorithms.advantages import ADVANTAGES, RewardedBatch, compute_advantages
from corral.algorithms.declarations import with_options
from corral.data.batch import Batch, FloatArray, Trajectory
from corral.recipe.errors import RecipeError, RunError, UserError
from corral.recipe.load import load_recipe
from corral.recipe.plan import make_plan
from corral.recipe.schema import Model, TeacherEndpoint
from corral.rollout.engine_server import EngineService, load_served_model, make_app
from corral.runtime.teacher_endpoint import EndpointTeacher

DISTILL = ("algorithm.name=distill", "optimizer.learning_rate=0.01", "batch.prompts_per_step=16")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A larger model that is sure of what it says."""
    folder = tmp_path_factory.mktemp("teachers") / "larger"
    torch.manual_seed(9)
    config = tiny_config()
    config.num_hidden_layers = 3
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.model.norm.weight.mul_(8)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def advantages(lead: torch.Tensor, rewards: torch.Tensor, task_weight: float = 0.0) -> torch.Tensor:
    """Of answers of one token each, all to the same prompt."""
    count = len(lead)
    batch = RewardedBatch(
        token_rewards=rewards,
        mask=torch.ones(count, dtype=torch.bool),
        offsets=torch.arange(count + 1),
        groups=torch.zeros(count, dtype=torch.int64),
        teacher_lead=lead,
    )
    return compute_advantages(with_options(ADVANTAGES["distill"], task_weight=task_weight), batch).advantages


def test_the_expected_policy_gradient_is_that_of_the_reverse_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, of_teacher = (torch.randn(11, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    log_p, log_t = logits.log_softmax(0), of_teacher.log_softmax(0)
    found = advantages((log_t - log_p).detach(), torch.zeros(11))
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - log_t)).sum(), logits, retain_graph=True)
    # All eleven answers, each as often as the policy gives it.
    (gradient,) = torch.autograd.grad(-(log_p.detach().exp() * found * log_p).sum(), logits)
    torch.testing.assert_close(gradient, expected)


def test_task_rewards_are_mixed_in() -> None:
    lead, rewards = torch.tensor([0.5, -1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    task = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    torch.testing.assert_close(advantages(lead, rewards, 0.3), lead + 0.3 * task)


@pytest.mark.slow
def test_the_policy_approaches_a_larger_teacher(tmp_path: Path, tiny_model: Path, teacher: Path) -> None:
    steps = steps_here(tmp_path, tiny_model, *DISTILL, f"reference.path={teacher}", "schedule.steps=30")
    kl = [row["distill/reverse_kl"] for row in steps]
    assert sum(kl[-5:]) < 0.5 * sum(kl[:5])


@pytest.mark.slow
def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    other = tmp_path / "other"
    save_tiny_model(other)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    steps_here(tmp_path, tiny_model, *DISTILL, f"reference.path={other}", "schedule.steps=1")  # more tokens do not hurt
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a": ', '"\u00e4": '))
    with pytest.raises(UserError, match=r"has other tokens than .*: 'a' is number"):
        steps_here(tmp_path, tiny_model, *DISTILL, f"reference.path={other}")


def test_distillation_needs_a_teacher_and_the_plan_says_what_it_costs(tmp_path: Path, teacher: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: x\nmodel: {{path: {teacher}}}\nalgorithm: {{name: distill}}\ndata: {{train: {{path: x.jsonl}}}}\n"
    )
    steps = "schedule.steps=1"
    with pytest.raises(RecipeError, match=r"needs a teacher: `reference.path` is its model"):
        make_plan(load_recipe(recipe, [steps]))
    endpoint = "reference.endpoint={url: 'http://127.0.0.1:1/v1', model: t}"
    with pytest.raises(RecipeError, match=r"are two teachers; leave one of them out"):
        make_plan(load_recipe(recipe, [steps, f"reference.path={teacher}", endpoint]))
    with pytest.raises(RecipeError, match=r"rollout.temperature: 0.7`: a server gives .* at temperature 1"):
        make_plan(load_recipe(recipe, [steps, endpoint, "rollout.temperature=0.7"]))
    with pytest.raises(RecipeError, match=r"reference.endpoint` has no effect"):
        make_plan(load_recipe(recipe, [steps, endpoint, "algorithm.name=grpo", "batch.samples_per_prompt=2"]))
    with pytest.raises(RecipeError, match=r"`reference.endpoint` is for a teacher"):
        make_plan(load_recipe(recipe, [steps, endpoint, "algorithm.name=grpo", "algorithm.kl.where=loss"]))
    served = make_plan(load_recipe(recipe, [steps, endpoint])).text()
    assert "teacher  t at http://127.0.0.1:1/v1, 64 requests at once; it needs no device of this run" in served
    assert "reference weights" not in served
    with pytest.raises(RecipeError, match=r"the reference is the teacher already"):
        make_plan(load_recipe(recipe, [steps, f"reference.path={teacher}", "algorithm.kl.where=loss"]))
    mixed = [steps, f"reference.path={teacher}", "algorithm.advantage.task_weight=0.5", "batch.samples_per_prompt=1"]
    assert any("rewards add nothing" in warning for warning in make_plan(load_recipe(recipe, mixed)).warnings)
    plan = make_plan(load_recipe(recipe, [steps, f"reference.path={teacher}"])).text()
    assert "distill: the teacher's log-prob of the token minus the policy's own" in plan


# --- behind an endpoint


@pytest.fixture(scope="module")
def served(teacher: Path) -> Iterator[str]:
    """The address of the teacher behind `corral serve`."""
    service = EngineService("larger")
    service.served = load_served_model(Model(path=str(teacher), dtype="float32"), 256, 16)
    with running(make_app(service, None)) as url:
        yield f"{url}/v1"
    service.served.engine.close()


def endpoint(url: str, **settings: Any) -> str:
    return "reference.endpoint=" + json.dumps({"url": url, "model": "larger", "retries": 1, **settings})


@pytest.mark.slow
def test_a_teacher_behind_an_endpoint_teaches_the_same(
    tmp_path: Path, tiny_model: Path, teacher: Path, served: str
) -> None:
    short = (*DISTILL, "batch.prompts_per_step=4", "schedule.steps=2")
    ours = steps_here(tmp_path, tiny_model, *short, f"reference.path={teacher}", "name=path")
    theirs = steps_here(tmp_path, tiny_model, *short, endpoint(served), "name=endpoint")
    for key in ("distill/reverse_kl", "policy/loss", "policy/gradient_norm", "reward/mean"):
        assert [row[key] for row in theirs] == pytest.approx([row[key] for row in ours], rel=1e-3, abs=1e-5), key


def test_a_served_teacher_with_other_tokens_is_refused(tmp_path: Path, teacher: Path, served: str) -> None:
    student = tmp_path / "student"
    save_tiny_model(student)
    text = (student / "tokenizer.json").read_text()
    (student / "tokenizer.json").write_text(text.replace('"o": ', '"\u00f6": '))
    with pytest.raises(UserError, match=r"other tokens than the model: number \d+ is 'ö' here and 'o' there"):
        steps_here(tmp_path, student, *DISTILL, endpoint(served))


class Unreliable:
    """Answers what `answers` says, one after the other, and then the last one again."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers, self.num_asked = answers, 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/completions")
        async def complete(request: Request) -> Response:
            status, content = self.answers[min(self.num_asked, len(self.answers) - 1)]
            self.num_asked += 1
            tokens = (await request.json())["prompt"]
            places = [None, *({str(token): {"logprob": -1.0}} for token in tokens[1:])]
            whole = {"choices": [{"prompt_logprobs": places}]}
            return JSONResponse(whole if content is None else content, status)

        return app


GOOD = (200, None)


def test_a_teacher_whose_tokens_are_not_known_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    with running(Unreliable(GOOD).app()) as url, pytest.raises(UserError, match="does not say the texts of tokens"):
        steps_here(tmp_path, tiny_model, *DISTILL, endpoint(f"{url}/v1"))


@pytest.mark.parametrize(
    ("answers", "num_asked", "message"),
    [
        ([(503, {}), GOOD], 2, None),
        ([(404, {"error": "no model larger"})], 1, r"no log-probs of 8 tokens in 1 attempt.*404: .*no model larger"),
        ([(500, {"error": "full"})], 2, r"no log-probs of 8 tokens in 2 attempt.*500: .*full"),
        ([(200, {"choices": [{"text": "?"}]})], 1, "did not answer with a finite log-prob for each token"),
        (
            [(200, {"choices": [{"prompt_logprobs": [None, {"3": {"logprob": -1}}]}]})],
            1,
            "did not answer with a finite",
        ),
    ],
)
def test_an_endpoint_that_fails_is_asked_again_and_then_named(
    answers: list[tuple[int, Any]], num_asked: int, message: str | None
) -> None:
    server = Unreliable(*answers)

    async def ask(url: str) -> FloatArray:
        teacher = EndpointTeacher(TeacherEndpoint(url=f"{url}/v1", model="larger", retries=1))
        try:
            return await teacher.compute_column(Batch.of([Trajectory.from_tokens(range(3, 11))]))
        finally:
            await teacher.close()

    with running(server.app()) as url:
        if message is None:
            assert asyncio.run(ask(url)).tolist() == [0.0] + [-1.0] * 7
        else:
            with pytest.raises(RunError, match=message):
                asyncio.run(ask(url))
    assert server.num_asked == num_asked
