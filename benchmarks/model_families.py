"""The fast path of several families beside the general one, at realistic widths with fewer layers, on a GPU.

Random weights in bfloat16. For each family: the mean difference of log-probs from plain transformers on the same
weights, tokens trained a second (forward and backward), and tokens generated a second.

    python benchmarks/model_families.py            # writes benchmarks/results/model_families.json
    python benchmarks/model_families.py FOLDER     # only writes the models there, for `corral bench rollout --model`
"""

import asyncio
import gc
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from tiny_families import tiny_family_config

from corral.bench.benchmark_models import save_tokenizer
from corral.data.batch import Batch, Trajectory
from corral.model.model_check import difference, plain_logprobs
from corral.model.model_loading import load_model
from corral.recipe.schema import Model, Optimizer
from corral.rollout.engine import Sampling
from corral.rollout.native_engine import NativeEngine
from corral.training.native_trainer import NativePolicyTrainer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMMON: dict[str, Any] = {"vocab_size": 32768, "num_hidden_layers": 8, "max_position_embeddings": 8192}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss-like": (
        "gpt_oss",
        {
            "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "intermediate_size": 2880, "num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 128,
        },
    ),
    "Gemma-3-like": (
        "gemma3_text",
        {
            "hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "intermediate_size": 10240, "sliding_window": 1024, "query_pre_attn_scalar": 256,
        },
    ),
    "latent attention (DeepSeek-V2-Lite-like)": (
        "deepseek_v2",
        {
            "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 16, "num_experts_per_tok": 6,
            "n_shared_experts": 2,
        },
    ),
    "mixture of experts (Qwen3-MoE-like)": (
        "qwen3_moe",
        {
            "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 32, "num_local_experts": 32,
            "num_experts_per_tok": 8,
        },
    ),
    "window (Mistral-like)": (
        "mistral",
        {
            "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 14336, "sliding_window": 512,
        },
    ),
}  # fmt: skip


def measure(folder: Path, implementation: str) -> dict[str, float | str]:
    model = load_model(Model(path=str(folder), dtype="bfloat16", implementation=implementation), DEVICE)
    generator = np.random.default_rng(0)
    stems = generator.integers(5, 32000, (4, 256))
    sequences = [[*stem, *generator.integers(5, 32000, 256)] for stem in stems for _ in range(8)]
    batch = Batch.of([Trajectory.from_tokens([int(t) for t in one], 256) for one in sequences])
    trainer = NativePolicyTrainer(model, temperature=1.0, optimizer=Optimizer(), total_updates=10)
    [pack] = batch.pack(10**6)
    [logprobs] = trainer.compute_logprobs([pack])
    place = {int(flat): n for n, flat in enumerate(pack.flat)}
    expected = plain_logprobs(model, [int(t) for t in sequences[0]])[255:]
    found = logprobs[[place[n] for n in range(256, 512)]]
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        trainer.forward_backward([(pack, lambda logprobs, entropy: logprobs.mean())])
        trainer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    engine = NativeEngine(model, None, max_sequences=128, max_prefill_tokens=16384, max_length=1024)
    num_new = 128 if implementation == "auto" else 32

    async def generate(seed: int) -> int:
        calls = [
            engine.generate([int(t) for t in stems[i % 4]], Sampling(max_tokens=num_new), seed + i) for i in range(128)
        ]
        return sum(len(completion.tokens) for completion in await asyncio.gather(*calls))

    asyncio.run(generate(0))
    started = time.perf_counter()
    num_tokens = asyncio.run(generate(1000))
    rollout_s = time.perf_counter() - started
    engine.release_cache()
    engine.close()
    return {
        "core": type(engine.core).__name__,
        "difference": difference([found], [expected]),
        "train_tokens_s": sum(map(len, sequences)) / min(seconds[1:]),
        "rollout_tokens_s": num_tokens / rollout_s,
    }


def save_model(name: str, folder: Path) -> int:
    """Writes the model of that shape; -> number of parameters."""
    model_type, shape = SHAPES[name]
    torch.manual_seed(0)
    config = tiny_family_config(model_type, **{**COMMON, **shape})
    config.eos_token_id = None
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    transformers_logging.set_verbosity_error()
    if len(sys.argv) > 1:
        for name in SHAPES:
            folder = Path(sys.argv[1]) / re.split(r"[( ]", name)[0].lower()
            print(f"{folder}: {name}, {save_model(name, folder) / 1e9:.1f} B")
        return
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            parameters = save_model(name, Path(folder))
            torch.cuda.empty_cache()
            rows = {}
            for implementation in ("auto", "general"):
                try:
                    rows[implementation] = measure(Path(folder), implementation)
                except Exception as error:  # one family that fails must not hide the others
                    rows[implementation] = {"error": f"{type(error).__name__}: {error}"}
                gc.unfreeze()
                gc.collect()
                torch.cuda.empty_cache()
                print(f"{name}, {parameters / 1e9:.1f} B, {implementation}: {rows[implementation]}", flush=True)
            results[name] = {"parameters": parameters, **rows}
    path = Path(__file__).parent / "results" / "model_families.json"
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
