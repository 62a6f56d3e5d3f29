"""Rehearses recipes of other systems' guides for 16 and 32 devices on this machine.

    python benchmarks/rehearsals.py [--only verl,roll] [--out FILE]

The recipes are what `corral migrate` makes of the guides' scripts and files (tests/migrate/golden).
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from common import temporary_folder

CORRAL = [sys.executable, "-m", "corral.cli.main"]
GOLDEN = Path(__file__).parents[1] / "tests" / "migrate" / "golden"
QWEN2_7B = {
    **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "tie_word_embeddings": False},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
}
QWEN2_1_5B = {
    **{"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "tie_word_embeddings": False},
    **{"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936},
}
QWEN2_0_5B = {
    **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "tie_word_embeddings": True},
    **{"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
}
RECIPES = {
    "rlinf-apart": ("rlinf_devices_apart_with_kl", QWEN2_1_5B),
    "rlinf-shared": ("rlinf_shared_devices", QWEN2_1_5B),
    "verl": ("verl_slurm", QWEN2_7B),
    "search-r1": ("search_r1_multinode", QWEN2_7B),
    "roll": ("roll_engine_on_some_devices", QWEN2_0_5B),
}
"""With the shapes of their models, which `config.json` on the hub has."""
LIMIT_S = 1500.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="names, with commas between them: " + ", ".join(RECIPES))
    parser.add_argument("--out", type=Path, help="the reports, as Markdown")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(RECIPES)
    texts, failed = [], []
    for name in chosen:
        seconds, code, text = rehearse(name)
        print(f"{name}: {seconds:.0f} s, exit code {code}\n{text}", flush=True)
        texts.append(f"## {name}: {seconds:.0f} s\n\n```text\n{text}\n```\n")
        failed += [name] * (code != 0)
        if options.out:
            options.out.write_text("\n".join(texts))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def rehearse(name: str) -> tuple[float, int, str]:
    golden, config = RECIPES[name]
    with temporary_folder() as temporary:
        folder = Path(temporary)
        recipe = folder / f"{name}.yaml"
        recipe.write_text((GOLDEN / golden / "recipe.yaml").read_text())
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
        started = time.monotonic()
        with (folder / "console.log").open("w") as console:
            command = [*CORRAL, "rehearse", recipe.name, "model.path=model"]
            ended = subprocess.run(
                command, cwd=folder, stdout=subprocess.PIPE, stderr=console, text=True, timeout=LIMIT_S
            )
        seconds = time.monotonic() - started
        lines = (folder / "console.log").read_text().splitlines()
        text = ended.stdout.strip() or "\n".join(lines[-20:])
        return seconds, ended.returncode, text


if __name__ == "__main__":
    main()
