"""One GRPO step, Corral against TRL: same model, prompts, samples, lengths, optimizer, reward, dtype and threads.

    python benchmarks/grpo_vs_trl.py                # everything; needs TRL in the same Python
    python benchmarks/grpo_vs_trl.py --smoke        # tiny sizes, to see whether it works

Each side runs in a process of its own, in turns. The first step of a process is warm-up. TRL is measured as it comes
and tuned in two ways; all have a first turn, the later turns are for the fastest of them.
"""

import argparse
import importlib.util
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from grpo_sides import corral_steps, trl_steps, workload_of
from report import RESULTS, Measured, Report, ratio, run_side, seconds_of, spread, take_turns
from workloads import WORKLOADS

NEVER_SAID = "<gh_stars>"
"""A token that a model never draws, put in the place of its end-of-turn token: no sample ends early, on any side."""

SIDES = {
    "corral": "Corral",
    "trl": "TRL, its defaults (micro-batches of 8, gradient checkpointing)",
    "trl-tuned": "TRL tuned: no checkpointing, one micro-batch",
    "trl-tuned-8": "TRL tuned: no checkpointing, micro-batches of 8",
}


def main() -> None:
    options = parse_options()
    if options.side:
        measure = corral_steps if options.side == "corral" else trl_steps
        Path(options.out).write_text(json.dumps(measure(options)))
        return
    sides = options.sides
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed in this Python, so only Corral is measured: pip install torch==2.13.0 trl==1.16.0")
        sides = ["corral"]
    report = Report("grpo_vs_trl", "A GRPO step, Corral against TRL (float32)", options.results, ["trl"])
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
        model = endless_model(options.model, Path(folder) / "model")
        for name in options.workloads:
            compare(report, name, model, sides, options)
    print(f"wrote {report.out}.json and .md")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a folder, or the built-in one")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a turn, besides the warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON and Markdown files")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one turn; the numbers mean nothing")
    for hidden in ("--side", "--workload", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.rounds = options.steps = 1
    return options


def endless_model(model: str, folder: Path) -> str:
    """A copy of the model (weights linked) whose end token is `NEVER_SAID`."""
    from transformers import AutoTokenizer

    from corral.model.load import model_source
    from corral.recipe.errors import UserError

    try:
        source = Path(model_source(model))
    except UserError as error:
        raise SystemExit(str(error)) from error
    if not source.is_dir():
        raise SystemExit(f"--model {model} is not a folder")
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file.resolve())
        else:
            shutil.copy(file, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    end = tokenizer.convert_tokens_to_ids(NEVER_SAID)
    if end in (None, tokenizer.unk_token_id):
        raise SystemExit(f"{model} has no token {NEVER_SAID}; set NEVER_SAID to another one that it never says")
    changes = {"tokenizer_config.json": NEVER_SAID, "config.json": end, "generation_config.json": end}
    for name, value in changes.items():
        settings = json.loads((folder / name).read_text())
        settings["eos_token" if isinstance(value, str) else "eos_token_id"] = value
        (folder / name).write_text(json.dumps(settings))
    return str(folder)


def compare(report: Report, name: str, model: str, sides: list[str], options: argparse.Namespace) -> None:
    workload = workload_of(name, options)
    print(f"{name}: {workload}", flush=True)

    def measure(side: str) -> Measured:
        arguments = ["--side", side, "--workload", name, "--model", model, "--steps", str(options.steps)]
        smoke = ["--smoke"] if options.smoke else []
        steps: Measured = run_side(sys.executable, Path(__file__).name, arguments + smoke, options.threads)[1:]
        for step in steps:
            if step["tokens"] != workload.tokens_per_step or not step["gradient_norm"] > 0:
                print(f"  NOT THE SAME WORK: {step}")
        return steps

    measured = take_turns(sides, options.rounds, measure)
    if len({tuple(step["prompt_tokens"] for step in steps[: options.steps]) for steps in measured.values()}) > 1:
        print("  NOT THE SAME WORK: the sides had different prompts")
    rivals = [side for side in measured if side != "corral"]
    best = min(rivals, key=lambda side: seconds_of(measured[side]), default=None)
    rows = [
        [
            SIDES[side],
            spread(steps),
            f"{statistics.median(step['generation_s'] for step in steps):.2f}",
            f"{statistics.median(step['seconds'] - step['generation_s'] for step in steps):.2f}",
            f"{workload.tokens_per_step / seconds_of(steps):.1f}",
            ratio(steps, measured.get("corral")) + (" (fastest rival)" if side == best else ""),
        ]
        for side, steps in measured.items()
    ]
    heading = f"{workload.num_prompts} prompts x {workload.num_samples} samples x {workload.num_new} new tokens"
    columns = ["", "step s: median (min-max)", "generation s", "rest s", "new tokens/s", "time against Corral's"]
    report.add(name, heading, columns, rows, {"workload": asdict(workload), "fastest_rival": best, "steps": measured})


if __name__ == "__main__":
    main()
