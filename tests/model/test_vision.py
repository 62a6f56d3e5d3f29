"""Models that read images, against transformers' own processor and forward pass."""

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import corral
from deadlines import within
from PIL import Image
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Qwen2VLConfig,
    Qwen2VLProcessor,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.image_utils import load_image

from corral.data.batch import Batch, Trajectory
from corral.data.images import decode_tokens, for_api, image_id, images_by_id
from corral.data.rows import Message, Row, row_from_mapping
from corral.data.sources import render_prompt
from corral.envs.base import EnvSet
from corral.envs.chat_endpoint import read_message
from corral.model.builtin_models import BLANK_VISION_SHAPE, save_blank_vision_model
from corral.model.lora import as_peft, peft_names, write_adapter_config
from corral.model.model_loading import load_model, load_tokenizer
from corral.model.vision import OF_VIDEOS, open_image
from corral.observe.run_files import read_metrics
from corral.recipe.errors import UserError
from corral.recipe.schema import Data, Environment, Lora, Model, Optimizer, Reward, Rollout, Source
from corral.recipe.shape import ModelShape
from corral.rewards.scorer_pool import InProcessScorer
from corral.rollout.chat_rendering import ChatRenderer
from corral.rollout.driver import Prompt, RolloutDriver
from corral.rollout.engine import Completion, Sampling
from corral.rollout.native_engine import NativeEngine
from corral.training.checkpoint import export_merged
from corral.training.native_trainer import NativePolicyTrainer

TEXT = {**BLANK_VISION_SHAPE["text_config"], "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
VISION = {**BLANK_VISION_SHAPE["vision_config"], "hidden_size": 32, "out_hidden_size": 64}
DEEP_VISION = {**VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
IDS = {key: value for key, value in BLANK_VISION_SHAPE.items() if key.endswith("_id")}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
TEXT |= MROPE
CONFIGS: dict[str, Any] = {
    "qwen2_5_vl": lambda: AutoConfig.for_model("qwen2_5_vl", text_config=TEXT, vision_config=VISION, **IDS),
    "qwen2_vl": lambda: Qwen2VLConfig(
        text_config=TEXT,
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 8,
            "temporal_patch_size": 1,
        },
        **IDS,
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config=TEXT,
        vision_config=DEEP_VISION,
        **IDS,
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(
        text_config={**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        vision_config=DEEP_VISION,
        **IDS,
    ),
}


def picture(seed: int, width: int = 32, height: int = 32) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(pixels).save(file, format="PNG")
        return file.getvalue()


CONVERSATIONS: list[list[Message]] = [
    [Message(role="user", content="<image>What is this?", images=[picture(0)])],
    [Message(role="user", content="<image>What is this?", images=[picture(1)])],  # as many tokens, another image
    [Message(role="user", content="Both: <image> and <image>.", images=[picture(0), picture(2, 70, 40)])],
    [Message(role="user", content="No picture at all, just words")],
]


@pytest.fixture(
    params=["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "qwen2_5_vl")],
    scope="module",
)
def model_spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    save_blank_vision_model(folder)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[request.param]())
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that a wrong position moves log-probs by tenths of nats
            parameter.mul_(3) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    return Model(path=str(folder), dtype="float32")


class Plain:
    """The model as transformers computes it, one conversation at a time."""

    def __init__(self, spec: Model) -> None:
        self.tokenizer = load_tokenizer(spec)
        self.model = AutoModelForImageTextToText.from_pretrained(spec.path, dtype=torch.float32).eval()
        self.processor = Qwen2VLProcessor.__new__(Qwen2VLProcessor)  # its constructor wants a video processor
        self.processor.image_processor, self.processor.tokenizer = self.tokenizer.vision.processor, self.tokenizer
        self.processor.image_token = "<|image_pad|>"

    def inputs(self, messages: list[Message]) -> dict[str, torch.Tensor]:
        """By transformers' own expansion of images: the text with as many image tokens as the processor says."""
        parts = [
            {"role": m["role"], "content": [{"type": "image"} if p is None else {"type": "text", "text": p} for p in q]}
            for m in messages
            for q in [[p for i, t in enumerate(m["content"].split("<image>")) for p in ([None, t] if i else [t])]]
        ]
        text = self.tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
        images = [Image.open(io.BytesIO(data)) for m in messages for data in m.get("images", ())]
        made = self.processor.image_processor(images=images, return_tensors="pt") if images else {}
        pieces = text.split("<|image_pad|>")
        for i in range(len(images)):
            pieces[i] += self.processor.replace_image_token(made, i)
        tokens = torch.tensor([self.tokenizer.encode("".join(pieces))])
        types = (tokens == self.model.config.image_token_id).int()
        return {"input_ids": tokens, **({"mm_token_type_ids": types, **made} if images else {})}

    def logprobs(self, messages: list[Message], completion: list[int]) -> torch.Tensor:
        """Log-prob of each token of the completion."""
        inputs = self.inputs(messages)
        added = torch.tensor([completion])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], added], 1)
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(added).int()], 1)
        logits = self.model(**inputs, use_cache=False).logits[0, -len(completion) - 1 : -1]
        return logits.log_softmax(-1).gather(1, added[0][:, None])[:, 0]


def test_pictures_are_upright_and_on_white() -> None:
    """As transformers' `load_image` turns them; on white as in Qwen's own utilities and vLLM."""
    turned, exif = Image.effect_noise((100, 40), 80).convert("RGB"), Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    opened = open_image(file.getvalue())
    assert opened.size == (40, 100)
    assert np.array_equal(opened, load_image(base64.b64encode(file.getvalue()).decode()))
    for mode, color in (("RGBA", (255, 0, 0, 0)), ("LA", (0, 0))):
        file = io.BytesIO()
        Image.new(mode, (3, 2), color).save(file, "PNG")
        assert np.array_equal(open_image(file.getvalue()), np.full((2, 3, 3), 255))


def rendered(tokenizer: Any, messages: list[Message]) -> list[int]:
    return render_prompt(tokenizer, Row(messages, None, "", {}), chat=True)


def test_tokens_are_those_of_the_models_own_processor(model_spec: Model) -> None:
    plain = Plain(model_spec)
    for messages in CONVERSATIONS:
        tokens = rendered(plain.tokenizer, messages)
        theirs = plain.inputs(messages)["input_ids"][0].tolist()
        assert [5 if token < 0 else token for token in tokens] == theirs
        assert {token for token in tokens if token < 0} == set(images_by_id(messages))
    assert rendered(plain.tokenizer, CONVERSATIONS[0]) != rendered(plain.tokenizer, CONVERSATIONS[1])


def test_log_probs_and_gradients_are_those_of_transformers(model_spec: Model) -> None:
    plain = Plain(model_spec)
    model = load_model(model_spec, torch.device("cpu"))
    completions = [[60, 61, 62], [60, 61, 62], [70, 71], [80, 81, 82, 83], [60, 61, 90]]
    conversations = [*CONVERSATIONS, CONVERSATIONS[0]]
    trajectories = []
    for messages, completion in zip(conversations, completions, strict=True):
        prompt = rendered(plain.tokenizer, messages)
        trajectory = Trajectory.from_tokens([*prompt, *completion], len(prompt))
        trajectory.images = images_by_id(messages)
        trajectories.append(trajectory)
    batch = Batch.of(trajectories)
    trainer = NativePolicyTrainer(model, temperature=1.0, optimizer=Optimizer(), total_updates=1)
    [pack] = batch.pack(10_000)
    [computed] = trainer.compute_logprobs([pack])
    expected = [plain.logprobs(m, c) for m, c in zip(conversations, completions, strict=True)]
    order = [list(pack.rows).index(row) for row in range(len(batch))]
    for place, theirs in zip(order, expected, strict=True):
        span = slice(int(pack.offsets[place + 1]) - len(theirs), int(pack.offsets[place + 1]))
        torch.testing.assert_close(computed[span], theirs, atol=1e-4, rtol=0)
    trainer.forward_backward([(pack, lambda logprobs, entropy: logprobs.sum())])
    torch.cat(expected).sum().backward()
    own = dict(model.named_parameters())
    for name, parameter in plain.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(own[name].grad, parameter.grad, atol=2e-3, rtol=1e-3, msg=name)
    assert any(p.grad is not None and p.grad.abs().max() > 1e-3 for n, p in own.items() if "visual" in n)


def test_requests_with_different_images_are_decoded_together(model_spec: Model) -> None:
    plain = Plain(model_spec)
    model = load_model(model_spec, torch.device("cpu"))
    engine = NativeEngine(model, plain.tokenizer, max_sequences=8, max_prefill_tokens=60, max_length=256)
    conversations = [*CONVERSATIONS, *CONVERSATIONS]

    async def generate() -> list[Completion]:
        calls = [
            engine.generate(
                rendered(plain.tokenizer, messages), Sampling(max_tokens=6 + i), seed=i, images=images_by_id(messages)
            )
            for i, messages in enumerate(conversations)
        ]
        return await asyncio.gather(*calls)

    completions = asyncio.run(generate())
    engine.close()
    assert engine.core.uses_cache
    for messages, completion in zip(conversations, completions, strict=True):
        # What the model generates may be an image token, which transformers cannot compute without an image.
        tokens = [0 if token in (5, 6) else token for token in completion.tokens[:-1]]
        theirs = plain.logprobs(messages, [*tokens, completion.tokens[-1]])
        checked = [i for i, token in enumerate(completion.tokens) if token not in (5, 6)]
        torch.testing.assert_close(torch.tensor(completion.logprobs)[checked], theirs[checked], atol=1e-3, rtol=0)


def test_an_observation_with_an_image_extends_a_conversation(model_spec: Model) -> None:
    tokenizer = load_tokenizer(model_spec)
    chat = ChatRenderer(tokenizer, chat=True)
    shown = Message(role="user", content="Now: <image>", images=[picture(3)])
    first = [Message(role="user", content="Hello"), Message(role="assistant", content="Hi")]
    whole = rendered(tokenizer, [*first, shown])
    added = chat.continuation([shown], ended=True)
    assert whole[-len(added) :] == added
    assert added.count(image_id(picture(3))) == 4
    assert chat.truncate([shown], 1, "") == [shown]


# --- rows


def test_images_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(picture(0))
    where, data = f"{tmp_path}/train.jsonl:1", Data(train=Source(path="x"))

    def prompt_of(prompt: Any, **columns: Any) -> list[Message]:
        return row_from_mapping({"prompt": prompt, "answer": "", **columns}, data, where).prompt

    file = str(tmp_path / "one.png")
    url = "data:image/png;base64," + base64.b64encode(picture(0)).decode()
    parts = [{"type": "image", "image": "one.png"}, {"type": "text", "text": "What?"}]
    expected = {"role": "user", "content": "<image>What?"}
    assert prompt_of([{"role": "user", "content": parts}]) == [{**expected, "images": [file]}]
    assert prompt_of("<image>What?", images=["one.png"]) == [{**expected, "images": [file]}]
    assert prompt_of("What?", images=[{"bytes": picture(0), "path": None}]) == [{**expected, "images": [picture(0)]}]
    assert prompt_of("What?", images=Image.open(file)) == [{**expected, "images": [prompt_image(file)]}]
    assert prompt_of([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]) == [
        {"role": "user", "content": "<image>", "images": [picture(0)]}
    ]
    assert prompt_of("What is <image> in HTML?") == [{"role": "user", "content": "What is <image> in HTML?"}]
    for given, problem in [
        (["two.png"], "no image two.png"),
        (["https://somewhere/one.png"], "images are not downloaded"),
        ([7], "an image must be a path"),
        (["one.png", "one.png"], "1 times `<image>`, and the row 2 images"),
    ]:
        with pytest.raises(UserError, match=problem):
            prompt_of("<image>What?", images=given)


def test_messages_for_the_api_are_read_back_as_they_were() -> None:
    for messages in CONVERSATIONS:
        again = [read_message(json.loads(json.dumps(message)), 0) for message in for_api(messages)]
        assert again == messages


def prompt_image(file: str) -> bytes:
    with io.BytesIO() as png:
        Image.open(file).save(png, format="PNG")
        return png.getvalue()


def test_an_image_that_is_cut_off_is_refused_before_it_is_computed_with(model_spec: Model) -> None:
    tokenizer, cut = load_tokenizer(model_spec), Message(role="user", content="<image>?", images=[picture(0)[:-500]])
    with pytest.raises(UserError, match=r"^row: an image of \d+ bytes cannot be read"):
        rendered(tokenizer, [cut])
    with pytest.raises(ValueError, match="cannot be read"):  # which costs an environment its trajectory, and no more
        ChatRenderer(tokenizer, chat=True).continuation([cut], ended=True)


def test_an_adapter_beside_a_model_of_images_is_exported_with_what_reads_them(tmp_path: Path) -> None:
    save_blank_vision_model(tmp_path / "base")
    (tmp_path / "base" / OF_VIDEOS).write_text('{"video_processor_type": "Qwen2VLVideoProcessor"}')
    adapted = load_model(Model(path=str(tmp_path / "base"), lora=Lora(rank=2), dtype="float32"), torch.device("cpu"))
    write_adapter_config(adapted, tmp_path / "step")
    own = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    stored = {peft: as_peft(name, own[name]).contiguous() for name, peft in peft_names(own).items()}
    save_file(stored, tmp_path / "step" / "adapter_model.safetensors")
    export_merged(tmp_path / "step", tmp_path / "out", "float32")
    assert load_tokenizer(Model(path=str(tmp_path / "out"))).vision is not None
    assert (tmp_path / "out" / OF_VIDEOS).read_text() == (tmp_path / "base" / OF_VIDEOS).read_text()


def test_a_model_of_text_refuses_images(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="the model reads none"):
        rendered(load_tokenizer(Model(path=str(tiny_model))), CONVERSATIONS[0])


# --- whole runs

AGENT = """
import base64, openai


def show(row, base_url, api_key, model):
    url = "data:image/png;base64," + base64.b64encode(row.extra["picture"]).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    messages = [{"role": "user", "content": content}]
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    first = client.chat.completions.create(model=model, messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "Sure?"}]
    client.chat.completions.create(model=model, messages=messages)
    return 1.0
"""


@pytest.mark.slow
def test_an_agent_shows_an_image_through_the_endpoint(model_spec: Model, tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(AGENT)
    tokenizer, model = load_tokenizer(model_spec), load_model(model_spec, torch.device("cpu"))
    environment = Environment(name="agent", options={"agent": f"{tmp_path}/shows.py:show"}, timeout_s=within(30))
    envs = EnvSet({"": environment}, {"": InProcessScorer(Reward(name="exact"))}, Rollout(max_turns=2))
    engine = NativeEngine(model, tokenizer, max_sequences=4, max_prefill_tokens=256, max_length=256)
    driver = RolloutDriver(engine, envs, ChatRenderer(tokenizer, True), 2, 128, 64, seed=0, max_turn_tokens=4)
    row = Row([Message(role="user", content="?")], None, "", {"picture": picture(1)})
    try:
        sampling = Sampling(max_tokens=4, stop_tokens=frozenset([2]))
        [trajectory] = asyncio.run(driver.roll_out([Prompt(0, 0, row, [1, 2])], 1, sampling))
    finally:
        envs.close()
        engine.close()
    assert trajectory.error is None
    assert trajectory.reward == 1.0
    assert trajectory.images == {image_id(picture(1)): picture(1)}
    expected = rendered(tokenizer, [Message(role="user", content="<image>What is this?", images=[picture(1)])])
    assert trajectory.tokens[: trajectory.prompt_length].tolist() == expected
    assert not trajectory.generated[trajectory.tokens < 0].any()
    assert "<|vision_start|><|image_pad|><|vision_end|>What is this?" in decode_tokens(
        tokenizer, trajectory.tokens.tolist()
    )


PICTURES = """
name: pictures
model: {path: blank-vision-1m, dtype: float32}
data: {train: {path: "pictures:colors", size: 200}, max_prompt_tokens: 64}
environment: {reward: {name: exact, workers: 1}}
rollout: {max_response_tokens: 1}
batch: {prompts_per_step: 16, samples_per_prompt: 32}
optimizer: {learning_rate: 3e-3}
schedule: {steps: 30}
logging: {runs: runs, curve: false}
"""


@pytest.mark.slow
def test_a_model_learns_to_read_pictures(tmp_path: Path) -> None:
    """Whoever does not look at the picture says one of four colors, and is right in a quarter of all cases."""
    (tmp_path / "recipe.yaml").write_text(PICTURES)
    finished = corral(tmp_path, "train", "recipe.yaml")
    assert finished.code == 0, finished.stderr
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "runs/pictures/metrics.jsonl")]
    assert sum(rewards[:3]) / 3 < 0.05
    assert sum(rewards[-6:]) / 6 > 0.38
    saved = tmp_path / "runs/pictures/checkpoints/step_000030"
    again = load_tokenizer(Model(path=str(saved)))
    assert rendered(again, CONVERSATIONS[0]) == rendered(load_tokenizer(BLANK), CONVERSATIONS[0])
    load_model(Model(path=str(saved), dtype="float32"), torch.device("cpu"))


def test_the_plan_counts_what_reads_the_images(model_spec: Model) -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(model_spec.path))
    actual = sum(parameter.numel() for parameter in model.parameters())
    shape = ModelShape.find(model_spec.path)
    assert shape is not None
    assert shape.num_parameters == pytest.approx(actual, rel=0.15)


def test_a_model_that_reads_images_is_not_sharded(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(PICTURES)
    refused = corral(tmp_path, "plan", "recipe.yaml", "cluster.devices_per_node=2")
    assert refused.code == 2
    assert "set `train.parallel.shard: 1` and `replicate` to the number of devices" in refused.stderr
    overrides = ("cluster.devices_per_node=2", "train.parallel.shard=1", "train.parallel.replicate=2")
    assert "general path (it reads images)" in corral(tmp_path, "plan", "recipe.yaml", *overrides).stdout


BLANK = Model(path="blank-vision-1m")
