"""Training scripts in the shapes that published ones have, and what a user may set before them."""

from pathlib import Path

SCRIPTS = [path.read_text() for path in sorted((Path(__file__).parent / "migrate" / "scripts").glob("*.sh"))]
SETTINGS: list[dict[str, str]] = [
    {},
    {"DEVICE": "npu", "NNODES": "4", "REWARD": "math"},
    {"DEVICE": "gpu", "TP": "1", "LOSS_MODE": "gspo", "EXTRA_ARGS": "x=[1,2]"},
    {"INFER_BACKEND": "sglang", "TP": "4", "MODEL_PATH": "/models/a.b/Llama.3"},
    {"INFER_BACKEND": "trtllm", "NNODES": "4", "LOSS_MODE": "dppo", "REWARD": "ex"},
    {"USE_KL": "False", "NNODES": "1", "MODEL_PATH": "gpt2", "LOSS_MODE": "geo_mean"},
    {"NO_CRITIC": "1", "REWARD": "em", "TP": "1", "NNODES": "3"},
    {"LOSS_MODE": "gpg", "USE_KL": "False", "NNODES": "4", "MODEL_PATH": "Qwen/Qwen2.5-Coder-7B"},
    {"MODEL_PATH": "meta/Llama-3-8B", "TP": "2", "EXTRA_ARGS": "a.b=c d"},
    {"MODEL_PATH": "a/c*d", "REWARD": "x y", "LOSS_MODE": "no-loss", "NNODES": "2", "USE_KL": "true"},
]
"""Ten ways to set variables that scripts have defaults for. (The script's own assignments do not change these.)"""
