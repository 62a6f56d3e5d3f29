"""What `fuzz.py` tries: for each kind of input, documents that are right, how they are broken, and who reads them."""

import asyncio
import base64
import functools
import gzip
import io
import json
import random
import re
import shutil
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from deadlines import within
from mutations import PIECES, any_value, broken_bytes, broken_json, broken_text, broken_tree, broken_value, places_in
from runs import make_manifest, rows_of, train_here
from safetensors.torch import load_file, save_file
from tiny import save_tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from corral.cli import migrate
from corral.cli.planning import load_own_recipe, print_plan
from corral.data.rows import Row
from corral.data.sources import load_rows
from corral.data.supervised import prepare_prompts
from corral.envs.built_in.agent import AgentEnv
from corral.envs.chat_endpoint import ChangedHistory
from corral.model.model_check import packed_logprobs
from corral.model.model_loading import load_model
from corral.recipe.keys import all_keys, choices_of
from corral.recipe.load import dump_recipe
from corral.recipe.schema import Data, Model, Source
from corral.retrieval.index import build, open_index
from corral.retrieval.searcher import Retriever
from corral.retrieval.server import QueryBatcher, RetrieverService, ServerLimits
from corral.retrieval.server import make_app as retriever_app
from corral.rollout.engine_server import CHAT, TEXT, TOKENS, EngineService, load_served_model
from corral.rollout.engine_server import make_app as engine_app
from corral.training.checkpoint import MANIFEST

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "migrate" / "golden"
Attempt = Callable[[Any], bool]


@dataclass(frozen=True)
class Kind:
    name: str
    weight: int
    """How many of a hundred inputs are of this kind."""
    make: Callable[[random.Random], Any]
    opened: Callable[[Path], AbstractContextManager[Attempt]]
    """With a folder for scratch: what reads an input, and returns whether it took it. Refusals are raised or False."""


KINDS: dict[str, Kind] = {}


def kind(name: str, weight: int, make: Callable[[random.Random], Any]) -> Callable[[Any], Any]:
    def declare(opened: Callable[[Path], Iterator[Attempt]]) -> Callable[[Path], AbstractContextManager[Attempt]]:
        as_context = contextmanager(opened)
        KINDS[name] = Kind(name, weight, make, as_context)
        return as_context

    return declare


# --- recipes: `corral plan`


@functools.cache
def recipes() -> list[str]:
    return [path.read_text() for path in sorted((ROOT / "recipes").glob("*.yaml"))]


@functools.cache
def recipe_values() -> list[Any]:
    """Values that are right for some key."""
    found: list[Any] = [name for key in all_keys().values() for name in choices_of(key.annotation)]
    found += [key.default for key in all_keys().values() if not key.required]
    trees = [yaml.safe_load(text) for text in recipes()]
    return found + [section for tree in trees for section in tree.values()]


@functools.cache
def right_pairs() -> list[tuple[str, Any]]:
    """Keys with values that they may have."""
    pairs: list[tuple[str, Any]] = []
    for path, key in all_keys().items():
        values = [*choices_of(key.annotation), *([] if key.required else [key.default])]
        pairs += [(".".join(path).replace("*", "a"), value) for value in values]
    return pairs


@functools.cache
def key_names() -> list[str]:
    return sorted({".".join(path).replace("*", "a") for path in all_keys()} | {path[-1] for path in all_keys()})


def broken_recipe(rng: random.Random) -> str:
    text = rng.choice(recipes())
    if rng.random() < 0.5:
        text = as_yaml(broken_tree(yaml.load(text, yaml.CSafeLoader), rng, key_names(), recipe_values()))
    if rng.random() < 0.5:
        text = rng.choice((broken_text, broken_value))(text, rng)
    return text


def as_yaml(tree: Any) -> str:
    try:
        return str(yaml.dump(tree, Dumper=yaml.CSafeDumper, allow_unicode=True, sort_keys=False))
    except UnicodeEncodeError:
        return json.dumps(tree)
    except RecursionError:
        return "[" * 3000


def plan(folder: Path, text: str, overrides: Sequence[str]) -> bool:
    """`corral plan`, and the recipe that a run's folder would have."""
    path = folder / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    recipe = load_own_recipe(path, overrides)
    print_plan(recipe, as_json=len(text) % 2 == 0)
    written, dumped = folder / "dumped.yaml", dump_recipe(recipe)
    written.write_text(dumped)
    assert dump_recipe(load_own_recipe(written, [])) == dumped, "a recipe is not what was written of it"
    return True


SMALL = "name: test\nmodel: {path: some/model}\ndata: {train: {path: rows.jsonl}}\nschedule: {steps: 10}\n"


def broken_overrides(rng: random.Random) -> list[str]:
    return [broken_override(rng) for _ in range(rng.choice((1, 1, 2, 4)))]


def broken_override(rng: random.Random) -> str:
    key, value = rng.choice(key_names()), any_value(rng, recipe_values())
    if rng.random() < 0.6:
        key, value = rng.choice(right_pairs())
    with suppress(ValueError, RecursionError):
        value = value if isinstance(value, str) else json.dumps(value)
    text = rng.choice((f"{key}={value}", f"{key}={value}", f"+{key}={value}", f"~{key}", f"{key}={rng.choice(PIECES)}"))
    text = broken_text(text, rng) if rng.random() < 0.25 else text
    # Other bytes than UTF-8 reach a program as such characters.
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")


@kind("overrides", 16, broken_overrides)
def plan_with_overrides(folder: Path) -> Iterator[Attempt]:
    yield lambda overrides: plan(folder, SMALL, overrides)


DEVICES = ["all", "0-3", "0,2,5", "0-1,4-7", "[0, 1]", "list(range(0, 4))", "range(0,8,2)", "4-7", "0", 5, [0, 1, 2]]
PLACEMENT = {
    "nodes": 2,
    "devices_per_node": 4,
    "placement": {"actor": "0-3", "rollout": "4-7", "actor, reference": "all", "critic": "list(range(0,4))"},
    "services": {"search": {"command": ["python", "-m", "http.server"], "port": 8000, "devices": 1}},
    "runtime": "auto",
    "transfer": "auto",
}


def broken_placement(rng: random.Random) -> str:
    tree: dict[str, Any] = {"name": "test", "model": {"path": "some/model"}, "data": {"train": {"path": "rows.jsonl"}}}
    tree["schedule"] = {"steps": 10, "max_staleness": rng.choice((0, 1))}
    tree["algorithm"] = {"name": rng.choice(("grpo", "ppo", "dapo"))}
    own: dict[str, Any] = {key: value for key, value in PLACEMENT.items() if rng.random() < 0.7}
    roles = rng.sample(
        ["actor", "rollout", "reference", "critic", "reward_model", "actor, rollout"], rng.randrange(1, 5)
    )
    own["placement"] = {role: rng.choice(DEVICES) for role in roles}
    for role in roles:
        if rng.random() < 0.3 and isinstance(own["placement"][role], str):
            own["placement"][role] = broken_text(own["placement"][role], rng)
    own["nodes"] = rng.choice((1, 2, 2, 4, 1000, any_value(rng)))
    if rng.random() < 0.3:  # one that is right, until it is broken
        own = {"nodes": 2, "devices_per_node": 4, "placement": {"actor, reference, critic": "0-3", "rollout": "4-7"}}
    if rng.random() < 0.5:
        own = broken_tree(own, rng, key_names(), [*DEVICES, "actor", "rollout"])
    tree["cluster"] = own
    try:
        return json.dumps(tree)  # which is YAML, too
    except (ValueError, RecursionError):
        return SMALL


def plan_text(folder: Path) -> Iterator[Attempt]:
    yield lambda text: plan(folder, text, [])


kind("recipe", 9, broken_recipe)(plan_text)
kind("placement", 16, broken_placement)(plan_text)


# --- configurations of other systems: `corral migrate`


CONFIGS: dict[str, tuple[str, list[str]]] = {
    "verl": ("a.sh", ["verl_dstack/input.sh", "verl_submit/input.sh"]),
    "search-r1": ("b.sh", ["search_r1_multinode/input.sh"]),
    "roll": ("c.yaml", ["roll_guide_two_nodes/input.yaml", "roll_guide_one_device/input.yaml"]),
    "rlinf": ("d.yaml", ["rlinf_shared_devices/input.yaml", "rlinf_devices_apart/input.yaml"]),
}


def broken_config(system: str, rng: random.Random) -> tuple[str, str]:
    """(the file's name, its content), or words of verl's command line without a file."""
    name, inputs = CONFIGS[system]
    text = (GOLDEN / rng.choice(inputs)).read_text()
    if name.endswith(".sh") and rng.random() < 0.25:
        name, text = "", " ".join(re.findall(r"[a-z_]+\.[\w.]+=[^\s\\]+", text))
    if name.endswith(".yaml") and rng.random() < 0.3:
        return name, as_yaml(broken_tree(yaml.load(text, yaml.CSafeLoader), rng))
    return name, rng.choice((broken_text, broken_value))(text, rng)


def migrate_config(folder: Path) -> Iterator[Attempt]:
    def attempt(given: tuple[str, str]) -> bool:
        name, text = given
        words = text.split(" ")
        if name:
            (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
            words = [str(folder / name)]
        own = migrate.own_recipe(words)
        if own is not None:
            migrate.print_own(own, words, as_json=False)
            return True
        as_json = len(text) % 2 == 0
        made = migrate.read(words, None if name else "verl", {}, every_key=True, as_json=as_json, guide=None)
        migrate.print_migration(made, strict=False, every_key=True, as_json=as_json, guide=None)
        return True

    yield attempt


for system in CONFIGS:
    kind(f"migrate-{system}", 3, functools.partial(broken_config, system))(migrate_config)


# --- rows of data, as `corral plan --check` and a run read them

PIXEL = base64.b64encode(bytes.fromhex("89504e470d0a1a0a") + bytes(40)).decode()
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT_ROWS: list[dict[str, Any]] = [
    {"prompt": "What is 2 + 3?", "answer": "5", "data_source": "sums", "level": 3},
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}], "answer": 5},
    {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "2?"}], "ability": "math"}
    | {"reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 0, "split": "train"}},
    {"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    | {"tools": [TOOL]},
    {"conversations": [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "Two."}], "system": "Be brief."},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "What?"}]}], "tools": json.dumps([TOOL])},
    {"prompt": "<image>What?", "images": [f"data:image/png;base64,{PIXEL}"], "answer": ""},
    {"prompt": json.dumps([{"role": "user", "content": "2?"}]), "completion": "Two."},
    {"prompt": "2?", "chosen": "Two.", "rejected": "Three."},
    {"chosen": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "Two."}]}
    | {"rejected": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "Three."}]},
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"prompt_key": "messages", "on_bad_row": "skip"},
    {"prompt_key": "conversations", "system": "You help."},
    {"template": "Q: {prompt}", "chat": False, "overlong": "truncate_left", "max_prompt_tokens": 20},
    {"on_bad_row": "skip", "overlong": "filter", "max_prompt_tokens": 30},
    {"train": {"filters": {"level": [1, 5]}}},
]
USES = ({}, {"with_completion": True}, {"with_completion": True, "with_rejected": True})


def broken_rows(rng: random.Random) -> tuple[str, bytes, int, int]:
    """(ending of the file, its content, which of SETTINGS, which of USES)"""
    rows = [rng.choice(CHAT_ROWS) for _ in range(rng.choice((1, 1, 2, 3)))]
    names = [name for row in CHAT_ROWS for name in row]
    setting, use = rng.randrange(len(SETTINGS)), rng.randrange(len(USES))
    ending = rng.choice((".jsonl", ".jsonl", ".jsonl", ".json", ".csv", ".jsonl.gz", ".parquet"))
    if ending.startswith(".jsonl"):
        content = b"\n".join(broken_json(row, rng, names) for row in rows)
    elif ending == ".json":
        content = broken_json(rows, rng, names)
    elif ending == ".csv":
        columns = ",".join(rows[0])
        lines = [",".join(json.dumps(str(value)) for value in row.values()) for row in rows]
        content = broken_text("\n".join([columns, *lines]), rng).encode("utf-8", "surrogatepass")
    else:
        return ending, parquet(rng, rows), setting, use
    if ending.endswith(".gz"):
        content = gzip.compress(content)
        content = broken_bytes(content, rng) if rng.random() < 0.3 else content
    return ending, content, setting, use


def parquet(rng: random.Random, rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    written = io.BytesIO()
    row = broken_tree(rows[0], rng) if rng.random() < 0.7 else rows[0]
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] if isinstance(row, dict) else []), written)
    except Exception:  # values of which there is no table
        return b"PAR1" + rng.randbytes(40) + b"PAR1"
    return broken_bytes(written.getvalue(), rng) if rng.random() < 0.5 else written.getvalue()


@kind("rows", 22, broken_rows)
def read_rows(folder: Path) -> Iterator[Attempt]:
    tokenizer = tiny_tokenizer()

    def attempt(given: tuple[str, bytes, int, int]) -> bool:
        ending, content, setting, use = given
        path = folder / f"rows{ending}"
        path.write_bytes(content)
        settings = SETTINGS[setting]
        source = Source.model_validate({"path": str(path), "max_rows": 100, **settings.get("train", {})})
        data = Data.model_validate({**settings, "train": source})
        rows = load_rows(source, data, **USES[use])
        prompts, _ = prepare_prompts(tokenizer, rows, data, with_answers=use > 0)
        return len(prompts) > 0

    yield attempt


# --- servers


class Client:
    """Asks an application as a server would, without a socket."""

    def __init__(self, app: Any) -> None:
        self.app, self.loop = app, asyncio.new_event_loop()

    def post(self, path: str, content: bytes) -> bool:
        status, answer = self.loop.run_until_complete(self._post(path, content))
        assert status < 500 or status == 503, f"answered with {status}: {answer!r}"
        return status == 200

    async def _post(self, path: str, content: bytes) -> tuple[int, bytes]:
        parts, status, answer = [content[: len(content) // 2], content[len(content) // 2 :]], 0, b""

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await asyncio.get_running_loop().create_future()  # the client never hangs up
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            nonlocal status, answer
            status = message.get("status", status)
            answer += message.get("body", b"")

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        address = {"server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1234), "scheme": "http", "http_version": "1.1"}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "headers": headers,
        }
        scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", **address}
        await self.app(scope, receive, send)
        return status, answer


RETRIEVE = [
    {"queries": ["What is the median?", "a string"], "topk": 3, "return_scores": True},
    {"queries": ["sort"], "topk_retrieval": 10, "topk_rerank": 3},
    {"queries": []},
]


@kind("retriever", 12, lambda rng: broken_json(rng.choice(RETRIEVE), rng, ["topk", "queries", "return_scores"]))
def ask_retriever(folder: Path) -> Iterator[Attempt]:
    corpus = folder / "corpus.jsonl"
    passages = [
        "the median of numbers",
        "to sort a list",
        "a string is text",
        "the mean of numbers",
        "lists are sorted",
    ]
    corpus.write_text("\n".join(json.dumps({"id": str(i), "contents": text}) for i, text in enumerate(passages)))
    build(corpus, folder / "index")
    service = RetrieverService(3, ServerLimits())
    service.batcher = QueryBatcher(Retriever(open_index(folder / "index")), service.limits.waiting, service.metrics)
    client = Client(retriever_app(service, None))
    yield lambda content: client.post("/retrieve", content)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2?"}]
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "stop": ["x"], "n": 1}
SERVED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": "m", "messages": MESSAGES, "max_tokens": 2, **SAMPLING}),
    (
        CHAT,
        {"messages": MESSAGES, "max_completion_tokens": 2, "tools": [TOOL], "tool_choice": "auto", "logprobs": True},
    ),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
    (TEXT, {"prompt": "2 + ", "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 0}),
    (TEXT, {"prompt": [5, 6, 7], "max_tokens": 2, "stop_token_ids": [3], "ignore_eos": True, "stream": True}),
    (TOKENS, {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2, "logprobs": 1, **SAMPLING}}),
]
FIELDS = sorted({name for _, body in SERVED for name in body} | {"presence_penalty", "logit_bias", "echo", "best_of"})


def broken_request(rng: random.Random) -> tuple[str, bytes]:
    path, body = rng.choice(SERVED)
    return path, broken_json(body, rng, FIELDS)


@kind("serve", 5, broken_request)
def ask_engine(folder: Path) -> Iterator[Attempt]:
    save_tiny_model(folder / "model")
    service = EngineService("tiny")
    with warnings.catch_warnings(action="ignore"):
        service.served = load_served_model(Model(path=str(folder / "model"), dtype="float32"), 96, 16)
    client = Client(engine_app(service, None))
    yield lambda given: client.post(*given)


AGENT = "import asyncio\n\n\nasync def wait(base_url):\n    await asyncio.sleep(1e6)\n"
ASSISTANT = {"role": "assistant", "content": "Two."}
SPOKEN = [
    {"model": "m", "messages": MESSAGES, "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}},
    {"model": "m", "messages": [*MESSAGES, ASSISTANT, {"role": "user", "content": "And 3?"}], "temperature": 1},
    {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    | {"response_format": {"type": "text"}, "n": 1, "tool_choice": "auto"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}]}
        ]
    },
]
REPLIES = (
    "Two.",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "<tool_call>{",
    "",
    "\x00\ud800",
)


def broken_conversation(rng: random.Random) -> tuple[list[tuple[bool, bytes]], str]:
    """Requests of an agent, as bodies or with all of their bytes broken, and what the model replies."""
    first = rng.choice(SPOKEN)
    bodies = [
        broken_json(first, rng, ["stop", "logprobs", *first]) if rng.random() < 0.7 else json.dumps(first).encode()
    ]
    for _ in range(rng.choice((0, 1, 1, 2))):
        more = {**first, "messages": [*first["messages"], ASSISTANT, {"role": "user", "content": "More."}]}
        bodies.append(broken_json(more, rng))
    return [(rng.random() < 0.1, body) for body in bodies], rng.choice(REPLIES)


@kind("endpoint", 10, broken_conversation)
def ask_agents_endpoint(folder: Path) -> Iterator[Attempt]:
    (folder / "waiting_agent.py").write_text(AGENT)
    runner = AgentEnv.open_shared(agent=f"{folder / 'waiting_agent.py'}:wait")
    loop = asyncio.new_event_loop()
    row = Row([{"role": "user", "content": "2?"}], "2", "", {})

    async def converse(given: tuple[list[tuple[bool, bytes]], str]) -> bool:
        bodies, reply = given
        async with trajectory(AgentEnv(None, runner, timeout_s=within(5), in_process=True), row, reply) as env:  # type: ignore[arg-type]
            reader, writer = await asyncio.open_connection("127.0.0.1", runner.endpoint.port)
            answered = False
            for is_raw, body in bodies:
                head = f"POST {CHAT} HTTP/1.1\r\nAuthorization: Bearer {env._session.key}\r\n"
                request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
                writer.write(broken_bytes(request, random.Random(body)) if is_raw else request)
                if is_raw:
                    writer.write_eof()
                status, closed = await status_of(reader)
                assert status < 500, f"answered with {status}"
                assert status or is_raw, "there was no answer"
                answered |= status == 200
                if closed or is_raw:
                    break
            writer.close()
            return answered

    yield lambda given: loop.run_until_complete(converse(given))


@asynccontextmanager
async def trajectory(env: AgentEnv, row: Row, reply: str) -> AsyncIterator[AgentEnv]:
    """An environment whose model always replies the same, as the driver runs it: an error ends the trajectory."""

    async def drive() -> None:
        with suppress(ChangedHistory, TimeoutError, UnicodeEncodeError):
            await env.reset(row, 0)
            while not (await env.step(reply)).done:
                pass
        await env.close()

    driving = asyncio.ensure_future(drive())
    await asyncio.sleep(0)
    try:
        yield env
    finally:
        await env.close()
        driving.cancel()
        with suppress(asyncio.CancelledError):
            await driving


async def status_of(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status of the next answer, 0 if there is none, and whether the connection is closed."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        if " 100 Continue" in head:
            return await status_of(reader)
        size = re.search(r"Content-Length: (\d+)", head)
        await reader.readexactly(int(size[1]) if size else 0)
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, True
    return int(head.split()[1]), "Connection: close" in head


# --- folders of models, and checkpoints, whose manifest fits

MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
STATE_FILES = ("state.json", "actor/optimizer.json", "ledger.jsonl", MANIFEST)
TENSOR_FILES = {"model": ("model.safetensors",), "checkpoint": ("model.safetensors", "actor/optimizer.safetensors")}
TENSOR_DAMAGES = ("gone", "renamed", "reshaped", "one number", "longer", "empty", "integers", "nan", "inf")
FILE_DAMAGES = ("gone", "empty", "pickle", "folder", "truncated", "flipped")
DEEP = "nested too deeply"
WRONG_VALUES: list[Any] = [
    *(None, True, -1, 0, 3, 1.5, 10**9, 2**63, 10**30, -(10**12), 1e300, float("nan"), float("inf"), "x", "", "1"),
    *("os.system", "../../x", DEEP, [], {}, [1], ["x"], {"x": 1}, {"a": {"b": [None]}}),
]
ONE_STEP, ONE_MORE = ("schedule.steps=1",), ("schedule.steps=3", "checkpoint.at_end=false")


@dataclass(frozen=True)
class Damage:
    file: str
    what: str
    """One of TENSOR_DAMAGES after the word tensor, one of FILE_DAMAGES, or `value`: one of JSON."""
    seed: int
    fits: bool
    """Whether the manifest is made anew, as by who has changed the file on purpose."""

    def apply(self, folder: Path) -> None:
        rng, file = random.Random(self.seed), folder / self.file
        if self.what.startswith("tensor "):
            damage_tensor(file, self.what.removeprefix("tensor "), rng)
        elif self.what == "value":
            damage_value(file, rng)
        else:
            damage_file(file, self.what, rng)
        if self.fits and (folder / MANIFEST).is_file() and self.file != MANIFEST:
            make_manifest(folder)


def damage_tensor(file: Path, what: str, rng: random.Random) -> None:
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name)
    changes: dict[str, Callable[[], torch.Tensor]] = {
        "reshaped": lambda: tensor[None],
        "one number": lambda: tensor.flatten()[:1].clone(),
        "longer": lambda: torch.cat([tensor.flatten(), tensor.flatten()]),
        "empty": lambda: tensor.flatten()[:0].clone(),
        "integers": lambda: tensor.to(torch.int32),
    }
    if what == "renamed":
        tensors[f"{name}.old"] = tensor
    elif what in changes:
        tensors[name] = changes[what]()
    elif what != "gone":
        tensors[name] = tensor.clone()
        tensors[name].view(-1)[rng.randrange(tensor.numel())] = float(what)
    save_file(tensors, file, metadata={"format": "pt"})


def damage_value(file: Path, rng: random.Random) -> None:
    """One value of JSON, of the first level or any, is another one or gone."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    number = rng.randrange(len(lines))
    tree = json.loads(lines[number])
    places = list(places_in(tree))
    first_level = [(around, key) for around, key in places if around is tree]
    around, key = rng.choice(first_level if rng.random() < 0.5 else places)
    if rng.random() < 0.1:
        del around[key]
    else:
        around[key] = rng.choice(WRONG_VALUES)
    lines[number] = json.dumps(tree).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000)
    file.write_text("\n".join(lines) + "\n" * (file.suffix == ".jsonl"))


def damage_file(file: Path, what: str, rng: random.Random) -> None:
    content = file.read_bytes()
    file.unlink()
    if what == "folder":
        file.mkdir()
    elif what == "flipped":
        file.write_bytes(broken_bytes(content, rng))
    elif what != "gone":
        cut = rng.randrange(len(content))
        file.write_bytes({"empty": b"", "pickle": b"\x80\x04\x95" + content, "truncated": content[:cut]}[what])


def any_damage(of: str, rng: random.Random) -> Damage:
    """What has a fitting manifest and is right in all that can be known is another model or checkpoint, not a damaged
    one: numbers of tensors are changed to such that are none, and bytes where the manifest shows it."""
    seed, files = rng.randrange(2**32), [*MODEL_FILES, *STATE_FILES * 3] if of == "checkpoint" else MODEL_FILES
    chance = rng.random()
    if chance < 0.35:
        return Damage(rng.choice(TENSOR_FILES[of]), f"tensor {rng.choice(TENSOR_DAMAGES)}", seed, fits=True)
    if chance < 0.85:
        return Damage(rng.choice(files), "value", seed, fits=True)
    what = rng.choice(FILE_DAMAGES)
    return Damage(rng.choice([*files, *TENSOR_FILES[of]]), what, seed, fits=what != "flipped")


@kind("model", 1, functools.partial(any_damage, "model"))
def train_damaged_model(folder: Path) -> Iterator[Attempt]:
    model, damaged = folder / "model", folder / "damaged"
    save_tiny_model(model)
    expected = rows_of(train_here(folder, model, *ONE_STEP))

    def attempt(damage: Damage) -> bool:
        for used in (damaged, folder / "runs"):
            shutil.rmtree(used, ignore_errors=True)
        shutil.copytree(model, damaged)
        damage.apply(damaged)
        rows = rows_of(train_here(folder, damaged, *ONE_STEP))
        assert rows == expected or is_as_transformers_computes(damaged), f"trained with something else: {rows}"
        return True

    yield attempt


@torch.no_grad()
def is_as_transformers_computes(folder: Path) -> bool:
    """A configuration with another number in it may be one of another model, which is then trained as what it is."""
    tokens = list(range(5, 60))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected = plain(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
    ours = load_model(Model(path=str(folder), dtype="float32"), torch.device("cpu"))
    return float((packed_logprobs(ours, [tokens], torch.device("cpu")) - expected).abs().max()) < 1e-4


@kind("checkpoint", 1, functools.partial(any_damage, "checkpoint"))
def resume_from_damaged_checkpoint(folder: Path) -> Iterator[Attempt]:
    """Where it is not usable, the run begins again, or at an earlier checkpoint: its steps are the same then."""
    model, kept = folder / "model", folder / "kept"
    save_tiny_model(model)
    run = train_here(folder, model)
    shutil.copytree(run, kept)
    expected = rows_of(train_here(folder, model, *ONE_MORE))

    def attempt(damage: Damage) -> bool:
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        checkpoint = run / "checkpoints" / "step_000002"
        damage.apply(checkpoint)
        rows = rows_of(train_here(folder, model, *ONE_MORE))
        is_other_model = damage.file in MODEL_FILES and is_as_transformers_computes(checkpoint)
        assert rows == expected or is_other_model, f"trained with something else: {rows}"
        return True

    yield attempt
