"""Writes `docs/models.md`: every causal architecture of transformers, compared with its plain forward pass.

Takes about ten minutes: python docs/generate_models.py
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the table is of a CPU

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from tiny_families import VARIANTS, causal_types, compare_folder, config_of, tiny_family_model  # noqa: E402

from corral.model.families import FAMILIES  # noqa: E402
from corral.recipe.errors import UserError  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
HEAD = """# Models

A model takes one of two paths, and `corral plan` says which and why.

- The **fast path** computes packed sequences with shared prefixes and decodes with continuous batching. It is for
  families that were compared with plain transformers; they are declared in `corral/model/families.py`.
- The **general path** is for every other causal model that transformers loads: its own forward pass, one sequence at a
  time, and its own cache, in batches of equally long sequences. It is slow and right. `model.implementation: general`
  chooses it for any model, to compare with. Tensor, expert, context and pipeline parallel training need the fast path.

Qwen2-VL, Qwen2.5-VL, Qwen3-VL and its mixture of experts read **images**, on the general path, with one device for
each copy of the model (`train.parallel.replicate`). [data.md](data.md#images) says how rows carry images;
environments return them in `Message.images`, and agents send them to the endpoint. `recipes/pictures.yaml` trains a
tiny one on a CPU.

What neither computes is refused by name before anything is loaded: encoders, encoder-decoders, other models that read
images or video, quantized weights. When a model is loaded, a pack of unrelated sequences, and two sequences decoded
together, are compared with the model's own forward pass on the same weights; a difference that rounding does not
explain is an error.

Sequences longer than a model's positions are refused; with longrope (Phi-3, Phi-4) those longer than the original
length, because behind it the model changes the positions of all tokens at once.

## Devices

`model.dtype: auto` is bfloat16 on GPUs that multiply it (NVIDIA since Ampere, AMD), and there the Triton kernels are
used. Older GPUs such as the V100 (sm_70) compute in float16 with torch's own attention. Wheels of torch for CUDA 13
have no code for them; those for CUDA 12.6 (`cu126`) do, up to torch 2.14. On a CPU, auto is bfloat16 where the
processor multiplies it, else float32.

## Families of the fast path

| family | `model_type` | how its attention differs |
| --- | --- | --- |
"""
TABLE = """
## Compared with transformers {version}

Tiny random configurations in float32 on a CPU, ragged sequences with shared prefixes, two turns, more requests than
sequences: the largest difference of a log-prob in nats (trainer, engine), and of a gradient relative to the largest.
A name with a suffix is a variant (`-window8`: a sliding window of 8; `-v<qk`: values narrower than keys). Written by
`python docs/generate_models.py`.

`pytest tests/model/test_families.py` makes the same comparison on a GPU where there is one, with a bound of
0.01 instead of 0.001. On an H200 (2026-11-18, transformers 5.17) 198 of 200 are within it. The largest differences that
were seen are 0.003 (trainer), 0.004 (gradient) and 0.004 (engine); which operation rounds so was not looked for. Doge
is refused there, because a token's log-prob depends on those behind it, and of one type the tiny model could not be
built with that version.

Some models are decoded without a cache, by a forward pass over the whole sequence for each token, and the run says so:
those that have none, and those whose cache gives something else than their forward pass. In half precision Mamba and
Mamba 2 are among them: with random weights, rounding alone changed log-probs by more than a nat. `model.dtype: float32`
keeps their cache: 555 instead of 18 tokens/s for 32 sequences of a random Mamba 2 with 24 layers on that H200.

| configuration | path | trainer | gradient | engine | core |
| --- | --- | --- | --- | --- | --- |
"""


def rows() -> Iterator[str]:
    for name in [*causal_types(), *VARIANTS]:
        try:
            model = tiny_family_model(config_of(name))
            with torch.no_grad():
                model(input_ids=torch.randint(3, 90, (2, 13)), use_cache=False)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            yield f"| {name} | not compared: {reason[:90]} | | | | |"
            continue
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            try:
                found = compare_folder(Path(folder))
            except UserError as error:
                yield f"| {name} | refused: {str(error).replace(folder, name).removeprefix('model.path: ')} | | | | |"
                continue
        assert found.is_right, (name, found)
        numbers = f"{found.trainer:.0e} | {found.gradient:.0e} | {found.engine:.0e}"
        yield f"| {name} | {found.path.kind} | {numbers} | {found.cores} |"


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    families = "".join(
        f"| {family.name} | {', '.join(family.model_types)} | {family.difference or 'as Llama'} |\n"
        for family in FAMILIES
    )
    compared = []
    for row in rows():
        print(row, flush=True)
        compared.append(row)
    PAGE.write_text(HEAD + families + TABLE.format(version=transformers.__version__) + "\n".join(compared) + "\n")


if __name__ == "__main__":
    main()
