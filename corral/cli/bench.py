"""`corral bench rollout|train|step`: how fast, how near to what the device can do, and how that compares."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corral.cli.planning import examples
from corral.recipe.errors import UserError

if TYPE_CHECKING:
    from corral.recipe.schema import DtypeName

app = typer.Typer(
    help="Measure rollout, training or a whole step, beside others on the same device.",
    no_args_is_help=True,
    epilog=examples("corral bench rollout --smoke"),
)


ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Random weights of a shape (qwen2-1.5b, qwen2.5-3b, qwen2.5-7b, tiny), smollm2-135m-instruct, or a folder "
        "with a model. Default: qwen2-1.5b on a GPU, tiny without.",
        show_default=False,
    ),
]
Sides = Annotated[
    str | None, typer.Option(help="Some of them, such as corral,vllm. Default: all that can run.", show_default=False)
]
Out = Annotated[Path, typer.Option(help="Folder for bench_VERB.json and .md.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="Tiny sizes, to see whether it works; the numbers mean nothing.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each side, one after the other: A B A B.")]
Timeout = Annotated[
    float, typer.Option("--timeout", min=1, help="Seconds for one turn of a side, which is then ended.")
]
MaxSequences = Annotated[int, typer.Option(min=1, help="Sequences decoded at the same time, by Corral and vLLM.")]
MaxPrefillTokens = Annotated[int, typer.Option(min=1, help="Prompt tokens that Corral computes in one pass.")]


@app.command(epilog=examples("corral bench rollout --sides corral,vllm --model qwen2.5-7b"))
def rollout(
    model: ModelOption = None,
    sides: Sides = None,
    out: Out = Path("bench"),
    smoke: Smoke = False,
    workloads: Annotated[
        str | None,
        typer.Option(
            help="Some of fixed-128,fixed-512,ragged (default on a GPU) and distinct,grouped (default without).",
            show_default=False,
        ),
    ] = None,
    rounds: Rounds = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each workload in a turn; of ragged one.")] = 2,
    max_sequences: MaxSequences = 1024,
    max_prefill_tokens: MaxPrefillTokens = 8192,
    vllm_python: Annotated[
        str | None, typer.Option(help="A Python that has vLLM, where it is not this one.", show_default=False)
    ] = None,
    vllm_memory: Annotated[float, typer.Option(min=0.05, max=1, help="Fraction of the device for vLLM.")] = 0.9,
    vllm_block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a block of vLLM's cache. Default: vLLM's.", show_default=False)
    ] = None,
    sglang_python: Annotated[
        str | None, typer.Option(help="A Python that has SGLang, where it is not this one.", show_default=False)
    ] = None,
    sglang_memory: Annotated[float, typer.Option(min=0.05, max=1, help="Fraction of the device for SGLang.")] = 0.8,
    timeout: Timeout = 600.0,
) -> None:
    """Generation with log-probs: Corral's engine, vLLM and SGLang with and without them, transformers' generate."""
    from corral.bench.workloads import CPU_WORKLOADS, GPU_WORKLOADS, WORKLOADS, PeerOptions
    from corral.data.plugins import did_you_mean

    chosen = split_names(workloads) or (GPU_WORKLOADS if device_type() == "cuda" else CPU_WORKLOADS)
    for name in chosen:
        if name not in WORKLOADS:
            raise UserError(f"--workloads {name}: there are {', '.join(WORKLOADS)}{did_you_mean(name, WORKLOADS)}")
    run(
        "rollout", model, sides, out, smoke, timeout,
        workloads=tuple(chosen), rounds=rounds, repeats=repeats, max_sequences=max_sequences,
        max_prefill_tokens=max_prefill_tokens,
        peers=PeerOptions(
            vllm_memory=vllm_memory, vllm_python=vllm_python, vllm_block_size=vllm_block_size,
            sglang_python=sglang_python, sglang_memory=sglang_memory,
        ),
    )  # fmt: skip


@app.command(epilog=examples("corral bench train --model smollm2-135m-instruct --rounds 2"))
def train(
    model: ModelOption = None,
    sides: Sides = None,
    out: Out = Path("bench"),
    smoke: Smoke = False,
    rounds: Rounds = 1,
    timeout: Timeout = 600.0,
) -> None:
    """Forward, backward and AdamW on 8 sequences of 1,024 tokens: Corral's trainer and a plain transformers model."""
    run("train", model, sides, out, smoke, timeout, rounds=rounds)


@app.command(epilog=examples("corral bench step --prompts 4 --samples 8 --new-tokens 32"))
def step(
    model: ModelOption = None,
    sides: Sides = None,
    out: Out = Path("bench"),
    smoke: Smoke = False,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a step.")] = 64,
    samples: Annotated[int, typer.Option(min=2, help="Samples of each prompt.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    shared_tokens: Annotated[int, typer.Option(min=0, help="Of these, the ones that all prompts begin with.")] = 0,
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each sample.")] = 256,
    rounds: Rounds = 1,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps, besides the first, which is warm-up.")] = 3,
    max_sequences: MaxSequences = 1024,
    max_prefill_tokens: MaxPrefillTokens = 8192,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of Corral's backward passes.")] = 8192,
    lora_rank: Annotated[int, typer.Option(min=0, help="Train adapters of this rank; TRL's are PEFT's. 0: none.")] = 0,
    trl_micro_batch: Annotated[int, typer.Option(min=1, help="Samples of TRL's backward passes.")] = 16,
    trl_dtype: Annotated[str, typer.Option(help="Of TRL's weights: float32, or bfloat16 without masters.")] = "float32",
    trl_checkpointing: Annotated[
        bool, typer.Option("--trl-checkpointing", help="TRL recomputes activations: less memory.")
    ] = False,
    trl_correction: Annotated[
        bool, typer.Option("--trl-correction", help="TRL corrects for the engine's log-probs: another forward pass.")
    ] = False,
    trl_vllm_memory: Annotated[
        float, typer.Option(min=0.05, max=1, help="Fraction of the device for TRL's vLLM.")
    ] = 0.3,
    timeout: Timeout = 600.0,
) -> None:
    """A GRPO step, 64 prompts x 8 samples x 256 new tokens: Corral's loop, and TRL's trainer with vLLM in it."""
    from corral.bench.workloads import SMALL_STEP, PeerOptions, StepWork

    work = StepWork(prompts, samples, prompt_tokens, new_tokens, shared_tokens, steps, lora_rank)
    if smoke:
        work = replace(SMALL_STEP, lora_rank=lora_rank)
    if shared_tokens >= prompt_tokens:
        raise UserError(f"--shared-tokens {shared_tokens}: must be fewer than the {prompt_tokens} of a prompt")
    if trl_dtype not in ("float32", "bfloat16"):
        raise UserError(f"--trl-dtype {trl_dtype}: float32 or bfloat16")
    if not smoke and work.num_trajectories % min(trl_micro_batch, work.num_trajectories):
        raise UserError(
            f"--trl-micro-batch {trl_micro_batch}: must divide the {work.num_trajectories} samples of a step"
        )
    run(
        "step", model, sides, out, smoke, timeout,
        step=work, rounds=rounds, max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens,
        micro_batch_tokens=micro_batch_tokens,
        peers=PeerOptions(
            trl_micro_batch=trl_micro_batch, trl_dtype=trl_dtype, trl_checkpointing=trl_checkpointing,
            trl_correction=trl_correction, trl_vllm_memory=trl_vllm_memory,
        ),
    )  # fmt: skip


def run(
    verb: str, model: str | None, sides: str | None, out: Path, smoke: bool, timeout_s: float, **settings: Any
) -> None:
    from corral.bench.benchmark_models import model_folder
    from corral.bench.comparison import choose_sides, compare
    from corral.bench.workloads import BenchSettings, PeerOptions

    device = device_type()
    dtype: DtypeName = "bfloat16" if device == "cuda" else "float32"
    model = model or ("qwen2-1.5b" if device == "cuda" and not smoke else "tiny")
    peers: PeerOptions = settings.setdefault("peers", PeerOptions())
    chosen = choose_sides(verb, split_names(sides), device, peers)
    if smoke:
        settings |= {"max_sequences": 8, "max_prefill_tokens": 64, "micro_batch_tokens": 64}
    bench_settings = BenchSettings(
        verb=verb,
        model=model,
        folder=str(model_folder(model, dtype)),
        device=device,
        dtype=dtype,
        smoke=smoke,
        timeout_s=timeout_s,
        **settings,
    )
    compare(bench_settings, chosen, out, ["corral", *sys.argv[1:]], lambda text: print(text, flush=True))


def device_type() -> str:
    from corral.model.model_loading import default_device

    return default_device().type


def split_names(names: str | None) -> list[str]:
    """`a,b` as a list."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]
