"""`corral bench rollout|train|step`: how fast, how near to what the device can do, and how that compares."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from corral.recipe.errors import UserError
from corral.recipe.schema import DtypeName

app = typer.Typer(
    help="Measure rollout, training or a whole step, beside others on the same device.", no_args_is_help=True
)


def register(main: typer.Typer) -> None:
    main.add_typer(app, name="bench")


ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Random weights of a shape (qwen2-1.5b, tiny), or a folder with a model. "
        "Default: qwen2-1.5b on a GPU, tiny without.",
        show_default=False,
    ),
]
Sides = Annotated[
    str | None, typer.Option(help="Some of them, such as corral,vllm. Default: all that can run.", show_default=False)
]
Out = Annotated[Path, typer.Option(help="Folder for bench_VERB.json and .md.")]
Smoke = Annotated[bool, typer.Option("--smoke", help="Tiny sizes, to see whether it works; the numbers mean nothing.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds for one side; a slower one is ended.")]
MaxSequences = Annotated[int, typer.Option(min=1, help="Decoded at the same time, by Corral and vLLM.")]
MaxPrefillTokens = Annotated[int, typer.Option(min=1, help="Prompt tokens that Corral computes in one pass.")]


@app.command()
def rollout(
    model: ModelOption = None,
    sides: Sides = None,
    out: Out = Path("bench"),
    smoke: Smoke = False,
    workloads: Annotated[
        str | None, typer.Option(help="Some of fixed-128,fixed-512,ragged.", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of the fixed workloads; the ragged one is measured once.")] = 2,
    max_sequences: MaxSequences = 1024,
    max_prefill_tokens: MaxPrefillTokens = 8192,
    vllm_memory: Annotated[float, typer.Option(min=0.05, max=1, help="Share of the device for vLLM.")] = 0.9,
    timeout: Timeout = 600.0,
) -> None:
    """Generation with log-probs: Corral's engine, vLLM with and without log-probs, transformers' generate."""
    from corral.bench.settings import WORKLOADS, Peers
    from corral.data.plugins import did_you_mean

    chosen = split(workloads) or list(WORKLOADS)
    for name in chosen:
        if name not in WORKLOADS:
            raise UserError(f"--workloads {name}: there are {', '.join(WORKLOADS)}{did_you_mean(name, WORKLOADS)}")
    run(
        "rollout", model, sides, out, smoke, timeout,
        workloads=tuple(chosen), repeats=repeats, max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens,
        peers=Peers(vllm_memory=vllm_memory),
    )  # fmt: skip


@app.command()
def train(
    model: ModelOption = None,
    sides: Sides = None,
    out: Out = Path("bench"),
    smoke: Smoke = False,
    timeout: Timeout = 600.0,
) -> None:
    """Forward, backward and AdamW on 8 sequences of 1,024 tokens: Corral's trainer and a plain transformers model."""
    run("train", model, sides, out, smoke, timeout)


@app.command()
def step(
    model: ModelOption = None,
    sides: Sides = None,
    out: Out = Path("bench"),
    smoke: Smoke = False,
    steps: Annotated[int, typer.Option(min=1, help="Measured, besides the first, which is warm-up.")] = 3,
    max_sequences: MaxSequences = 1024,
    max_prefill_tokens: MaxPrefillTokens = 8192,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Of Corral's backward passes.")] = 8192,
    trl_micro_batch: Annotated[int, typer.Option(min=1, help="Samples of TRL's backward passes.")] = 16,
    trl_dtype: Annotated[str, typer.Option(help="Of TRL's weights: float32, or bfloat16 without masters.")] = "float32",
    trl_checkpointing: Annotated[
        bool, typer.Option("--trl-checkpointing", help="TRL recomputes activations: less memory.")
    ] = False,
    trl_correction: Annotated[
        bool, typer.Option("--trl-correction", help="TRL corrects for the engine's log-probs: another forward pass.")
    ] = False,
    trl_vllm_memory: Annotated[float, typer.Option(min=0.05, max=1, help="Share of the device for TRL's vLLM.")] = 0.3,
    timeout: Timeout = 600.0,
) -> None:
    """A GRPO step, 64 prompts x 8 samples x 256 new tokens: Corral's loop, and TRL's trainer with vLLM in it."""
    from corral.bench.settings import STEP, Peers

    if trl_dtype not in ("float32", "bfloat16"):
        raise UserError(f"--trl-dtype {trl_dtype}: float32 or bfloat16")
    if not smoke and STEP.num_trajectories % trl_micro_batch:
        raise UserError(
            f"--trl-micro-batch {trl_micro_batch}: must divide the {STEP.num_trajectories} samples of a step"
        )
    run(
        "step", model, sides, out, smoke, timeout,
        steps=steps, max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens,
        micro_batch_tokens=micro_batch_tokens,
        peers=Peers(
            trl_micro_batch=trl_micro_batch, trl_dtype=trl_dtype, trl_checkpointing=trl_checkpointing,
            trl_correction=trl_correction,
            trl_vllm_memory=trl_vllm_memory,
        ),
    )  # fmt: skip


def run(
    verb: str, model: str | None, sides: str | None, out: Path, smoke: bool, timeout_s: float, **settings: Any
) -> None:
    from corral.bench.models import folder_of
    from corral.bench.run import bench
    from corral.bench.settings import Settings
    from corral.bench.sides import chosen_sides
    from corral.model.model_loading import default_device

    device = default_device().type
    dtype: DtypeName = "bfloat16" if device == "cuda" else "float32"
    model = model or ("qwen2-1.5b" if device == "cuda" and not smoke else "tiny")
    chosen = chosen_sides(verb, split(sides), device)
    if smoke:
        settings |= {"max_sequences": 8, "max_prefill_tokens": 64, "micro_batch_tokens": 64}
    made = Settings(
        verb=verb,
        model=model,
        folder=str(folder_of(model, dtype)),
        device=device,
        dtype=dtype,
        smoke=smoke,
        timeout_s=timeout_s,
        **settings,
    )
    command = ["corral", *sys.argv[1:]]
    bench(made, chosen, out, command, lambda text: print(text, flush=True))


def split(names: str | None) -> list[str] | None:
    """`a,b` as a list; None if there is nothing in it."""
    return [name.strip() for name in (names or "").split(",") if name.strip()] or None
