"""`corral plan --fit`: what it proposes fits, nothing cheaper does, and where nothing fits it says so."""

import json
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from commands import corral

from corral.cli.planning import planned
from corral.recipe.errors import UserError
from corral.recipe.fit import Hardware, candidates, find_fit, format_seconds
from corral.recipe.load import load_recipe
from corral.recipe.plan import make_plan
from corral.recipe.schema import Recipe
from corral.recipe.shape import SMOLLM2_135M, ModelShape
from corral.recipe.step_time import DEVICE_KINDS, estimate_step_s

ROOT = Path(__file__).parents[2]
GIB = 2**30
ONE, NODE, FOUR_NODES = "1xh100-80", "8xh100-80", "32xh100-80"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "fit_table.py"))


@pytest.fixture(scope="module")
def folder(script: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and a folder with the configuration of each model."""
    made = tmp_path_factory.mktemp("fit")
    script["write_inputs"](made)
    return made


def load(folder: Path, model: str, *overrides: str) -> tuple[Recipe, ModelShape]:
    recipe = load_recipe(folder / "recipe.yaml", [f"model.path={folder / model}", *overrides])
    return recipe, ModelShape.from_folder(folder / model)


FITTING = [
    ("Qwen2.5-7B", NODE),
    ("Qwen2.5-7B", FOUR_NODES),
    ("Qwen2.5-14B", NODE),
    ("Qwen2.5-32B", FOUR_NODES),
    ("Qwen2.5-72B", FOUR_NODES),
    ("Qwen3-30B-A3B", NODE),
]


@pytest.mark.parametrize(("model", "devices"), FITTING)
def test_a_proposal_planned_again_fits_with_a_tenth_to_spare(folder: Path, model: str, devices: str) -> None:
    recipe, shape = load(folder, model)
    fit = find_fit(recipe, Hardware.parse(devices), shape)
    _, plan = planned(folder / "recipe.yaml", [f"model.path={folder / model}", *fit.overrides])
    totals = [total for group in plan.memory for total in group.totals.values()]
    assert max(totals) == fit.peak <= 0.9 * 80 * GIB
    [group] = plan.memory
    [cache] = [item.bytes_by_phase["rollout"] for item in group.items if item.name == "KV cache"]
    engine, sequences = plan.recipe.rollout.engine, plan.recipe.rollout.max_sequences
    per_token = shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * 2
    assert cache == sequences * 4096 * per_token // engine.tensor_parallel  # not cut to what is left
    assert 32 <= sequences <= 1024
    assert plan.recipe.batch.max_tokens_per_micro_batch >= 4096
    if engine.name == "vllm":
        weights = 2 * shape.num_parameters / engine.tensor_parallel
        assert (weights + cache) / (80 * GIB) < engine.memory_fraction < 0.9


@pytest.mark.parametrize(("model", "devices"), FITTING)
def test_no_candidate_before_the_proposal_fits(folder: Path, model: str, devices: str) -> None:
    recipe, shape = load(folder, model)
    hardware = Hardware.parse(devices)
    found = find_fit(recipe, hardware, shape).recipe
    before = []
    for _, candidate in candidates(recipe, hardware, shape):
        settings = [candidate.train, candidate.rollout.engine]
        if settings == [found.train, found.rollout.engine]:
            break
        before.append(candidate)
    else:
        pytest.fail("the proposal is none of the candidates")
    for candidate in before:
        unbounded = candidate.model_copy(
            update={"cluster": candidate.cluster.model_copy(update={"device_memory": 1e6})}
        )
        [group] = make_plan(unbounded, shape).memory
        assert max(group.totals.values()) > 0.9 * 80 * GIB


def test_candidates_are_tried_from_the_cheapest_to_the_dearest(folder: Path) -> None:
    recipe, shape = load(folder, "Qwen2.5-7B")
    order = []
    for _, one in candidates(recipe, Hardware.parse(FOUR_NODES), shape):
        parallel, engine = one.train.parallel, one.rollout.engine
        order.append((engine.name, tuple(one.train.offload), engine.tensor_parallel, one.train.gradient_checkpointing,
                      parallel.context, 32 // parallel.replicate))  # fmt: skip
    assert order[:3] == [("native", (), 1, False, 1, size) for size in (1, 8, 32)]
    assert order[3:6] == [("native", (), 1, True, 1, size) for size in (1, 8, 32)]
    firsts = list(dict.fromkeys((name, offload) for name, offload, *_ in order))
    everything = ("parameters", "gradients", "optimizer")
    offloads = [(), ("optimizer",), everything, ("optimizer", "activations"), (*everything, "activations")]
    assert firsts == [(name, offload) for offload in offloads for name in ("native", "vllm")]
    assert all(checkpoints for _, offload, _, checkpoints, *_ in order if "activations" in offload)
    assert not any(size == 1 for _, offload, *_, size in order if "parameters" in offload)


def test_a_small_model_has_whole_copies_and_the_native_engine(folder: Path) -> None:
    recipe, _ = load(folder, "Qwen2.5-7B")
    fit = find_fit(recipe, Hardware.parse("2x4xa100-40"), SMOLLM2_135M)
    assert "train.parallel.replicate=8" in fit.overrides
    assert "train.gradient_checkpointing=false" in fit.overrides
    assert fit.recipe.rollout.engine.in_process
    assert not any(line.startswith(("rollout.engine", "train.offload")) for line in fit.overrides)


def test_long_trajectories_spread_their_tokens(folder: Path) -> None:
    recipe, shape = load(folder, "Qwen2.5-7B", "rollout.max_response_tokens=40000")
    fit = find_fit(recipe, Hardware.parse("8xa100-40"), shape)
    assert fit.recipe.train.gradient_checkpointing
    assert fit.recipe.train.parallel.context > 1
    assert f"train.parallel.context={fit.recipe.train.parallel.context}" in fit.overrides


@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Qwen2.5-32B"])
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_another_engine_than_the_written_one_has_none_of_its_options(folder: Path, model: str, name: str) -> None:
    written = f"rollout.engine={{name: {name}, python: /there/python, memory_fraction: 0.3}}"
    recipe, shape = load(folder, model, written)
    fit = find_fit(recipe, Hardware.parse(FOUR_NODES), shape)
    again, _ = planned(folder / "recipe.yaml", [f"model.path={folder / model}", written, *fit.overrides])
    assert again.rollout.engine.name == ("native" if model == "Qwen2.5-7B" else "vllm")
    keeps = (model, name) == ("Qwen2.5-32B", "vllm")
    assert again.rollout.engine.python == ("/there/python" if keeps else None)


def test_rollouts_ahead_of_training_cost_the_longer_side(folder: Path) -> None:
    apart = ("cluster.placement={actor: 0-3, rollout: 4-7}", "schedule.max_staleness=1")
    recipe, shape = load(folder, "Qwen2.5-7B", *apart)
    fit = find_fit(recipe, Hardware.parse("8xh200-141"), shape)
    assert fit.recipe.rollout.max_sequences == 256  # 1024 trajectories on four engines
    others = sum(seconds for stage, seconds in fit.stages_s.items() if stage != "rollout")
    assert fit.step_s == pytest.approx(max(fit.stages_s["rollout"], others))


def test_supervised_fine_tuning_has_no_lines_of_an_engine(folder: Path) -> None:
    recipe, shape = load(folder, "Qwen2.5-14B", "algorithm.name=sft", "~rollout", "~batch.samples_per_prompt")
    fit = find_fit(recipe, Hardware.parse(NODE), shape)
    assert not any(line.startswith("rollout") for line in fit.overrides)
    assert set(fit.stages_s) == {"training"}


def test_the_lines_that_the_command_prints_are_a_command(folder: Path) -> None:
    model = f"model.path={folder / 'Qwen2.5-72B'}"
    finished = corral(folder, "plan", "recipe.yaml", model, "--fit", "--devices", FOUR_NODES)
    assert finished.code == 0, finished.stderr
    proposal, _, plan = finished.stdout.partition("\n\n")
    assert "an estimate from rates measured on one H200" in proposal
    assert "links: bytes of a step" in plan
    command = proposal[proposal.index("corral train") :].replace("\\\n", " ")
    words = shlex.split(command)
    again = corral(folder, "plan", *words[2:])
    assert again.code == 0, again.stderr
    assert again.stdout.strip() == plan.strip()


def test_where_nothing_fits_the_command_fails_and_says_what_would(folder: Path) -> None:
    model = f"model.path={folder / 'Qwen2.5-14B'}"
    finished = corral(folder, "plan", "recipe.yaml", model, "--fit", "--devices", ONE)
    assert finished.code == 2
    assert finished.stdout == ""
    refused, more, adapters = finished.errors
    assert "does not fit 1xh100-80: the least that any settings need is 87 GiB" in refused
    assert "the closest that fits: --devices 2xh100-80: 2 shards" in more
    assert "it fits with adapters, `model.lora.rank=32`" in adapters
    recipe, shape = load(folder, "Qwen2.5-14B")
    assert find_fit(recipe, Hardware.parse("2xh100-80"), shape)
    with pytest.raises(UserError):
        find_fit(recipe, Hardware.parse("1xh100-80"), shape)


def test_where_adapters_do_not_fit_either_weights_in_four_bits_may(folder: Path) -> None:
    for options in ((), ("model.lora.rank=32",)):
        recipe, shape = load(folder, "Qwen2.5-32B", *options)
        with pytest.raises(UserError, match=r"it fits with .*`model.quantization.bits=4`: .*engine native"):
            find_fit(recipe, Hardware.parse("1xh100-80"), shape)
    recipe, shape = load(folder, "Qwen2.5-32B", "model.lora.rank=32", "model.quantization.bits=4")
    assert find_fit(recipe, Hardware.parse("1xh100-80"), shape)


def test_a_model_whose_shape_is_unknown_is_not_guessed(folder: Path) -> None:
    finished = corral(folder, "plan", "recipe.yaml", "model.path=some/model", "--fit", "--devices", NODE)
    assert finished.code == 2
    assert "some/model is not on this machine, and a plan downloads nothing" in finished.stderr


def test_fit_needs_devices_and_devices_need_fit(folder: Path) -> None:
    for arguments in (["--fit"], ["--devices", NODE]):
        finished = corral(folder, "plan", "recipe.yaml", *arguments)
        assert finished.code == 2
        assert "--fit and --devices go together" in finished.stderr


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("8xh100-80", (1, 8, 80)),
        ("32xh100-80", (4, 8, 80)),
        ("1xA100-40", (1, 1, 40)),
        ("4x8xh100-80", (4, 8, 80)),
        ("3x4xl40s-48", (3, 4, 48)),
        ("8xh100", (1, 8, 80)),
        ("2x8xH200", (2, 8, 141)),
    ],
)
def test_devices_are_read(text: str, devices: tuple[int, int, int]) -> None:
    hardware = Hardware.parse(text)
    assert (hardware.nodes, hardware.devices_per_node, hardware.memory) == devices
    assert Hardware.parse(str(hardware)) == hardware


@pytest.mark.parametrize("text", ["8", "h100", "0xh100-80", "8 x h100-80", "8xh100-80x", "-1xh100-80", ""])
def test_other_words_for_devices_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(UserError, match=r"write COUNTxKIND-GIB or NODESxCOUNTxKIND-GIB, as 1xa100-40, 8xh100-80"):
        Hardware.parse(text)


def test_unknown_kinds_and_parts_of_nodes_are_refused() -> None:
    with pytest.raises(UserError, match="write how many GiB each has, as 8xa100-80"):
        Hardware.parse("8xa100")
    with pytest.raises(UserError, match="h101 is none of a100, "):
        Hardware.parse("8xh101-80")
    with pytest.raises(UserError, match="12 are not whole nodes of 8"):
        Hardware.parse("12xh100-80")


# --- seconds


def measured(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/h200" / f"{name}.json").read_text())["rows"]
    return rows


def benchmark_plan(model: str, prompts: int, samples: int, *, lora: bool = False) -> dict[str, float]:
    """Estimated stages of what `corral bench` runs: 128 tokens of a prompt, 256 new ones."""
    from corral.bench.benchmark_models import COMMON_CONFIG, SHAPES

    recipe = Recipe.model_validate(
        {
            "name": "measured",
            "model": {"path": model, **({"lora": {"rank": 32}} if lora else {})},
            "data": {"train": {"path": "rows.jsonl"}, "max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 256},
            "batch": {"prompts_per_step": prompts, "samples_per_prompt": samples},
            "schedule": {"steps": 1},
        }
    )
    shape = ModelShape.from_config({"model_type": "qwen2", **COMMON_CONFIG, **SHAPES[model]})
    return estimate_step_s(make_plan(recipe, shape, device="cuda"), DEVICE_KINDS["h200"])


@pytest.mark.parametrize("size", ["1.5b", "7b"])
def test_estimated_rollouts_are_near_the_measured_ones(size: str) -> None:
    model = {"1.5b": "qwen2-1.5b", "7b": "qwen2.5-7b"}[size]
    for row in measured(f"bench_rollout_engines_{size}"):
        if row["side"] == "corral":
            estimated = benchmark_plan(model, row["num_requests"], 1)["rollout"]
            assert estimated == pytest.approx(row["tokens"] / row["tokens_per_s"], rel=0.3)


@pytest.mark.parametrize(
    ("name", "model", "lora"), [("bench_step", "qwen2-1.5b", False), ("bench_step_lora_7b", "qwen2.5-7b", True)]
)
def test_estimated_steps_are_near_the_measured_ones(name: str, model: str, lora: bool) -> None:
    [row] = [row for row in measured(name) if row["side"] == "corral"]
    estimated = benchmark_plan(model, 64, 8, lora=lora)
    assert estimated["rollout"] == pytest.approx(row["generation_s"], rel=0.2)
    assert estimated["training"] == pytest.approx(row["rest_s"], rel=0.2)
    assert sum(estimated.values()) == pytest.approx(row["step_s"], rel=0.1)


@pytest.mark.slow
def test_the_table_of_the_page_is_what_the_script_prints(script: dict[str, Any]) -> None:
    assert "\n".join(script["table"]()) in (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")


def test_a_long_step_is_in_minutes() -> None:
    assert [format_seconds(seconds) for seconds in (0.25, 45.2, 1070)] == ["0.25 s", "45.2 s", "17.8 min"]
