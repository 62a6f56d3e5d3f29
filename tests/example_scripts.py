"""Training scripts in the shapes that published ones have. Variables that a user may set have defaults."""

SCRIPTS = [
    # defaults, arrays of parameters, a launcher that depends on the device
    r"""#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
INFER_BACKEND=${INFER_BACKEND:-vllm}
NNODES=${NNODES:-1}
case "${DEVICE}" in
    npu) NDEVICES_PER_NODE=${NDEVICES_PER_NODE:-16}; gpu_mem=0.5 ;;
    gpu | cuda)
        NDEVICES_PER_NODE=${NDEVICES_PER_NODE:-8}
        gpu_mem=0.6
        ;;
    *) echo "unknown device ${DEVICE}" >&2; exit 1 ;;
esac
prompt_length=1024 response_length=$((1024 * 2))
DATA=(
    data.train_files="$HOME/data/train.parquet"   # the rows
    data.max_response_length=${response_length}
    data.max_tokens=$((prompt_length + response_length))
)
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ] && [ "${DEVICE:-gpu}" = gpu ] &&
    { [ "$INFER_BACKEND" = vllm ] || [ "$INFER_BACKEND" = sglang ]; }; then
    LAUNCH=(uv run --frozen --extra "$INFER_BACKEND" python3)
fi
[ "${DEVICE}" = npu ] && DATA+=(trainer.device=npu)
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    rollout.name=$INFER_BACKEND rollout.gpu_memory_utilization=$gpu_mem \
    trainer.n_gpus_per_node=${NDEVICES_PER_NODE} trainer.nnodes=$NNODES \
    trainer.logger='["console","wandb"]' "$@" 2>&1 | tee "run.log"
""",
    # a loss by its name, numbers that follow from it
    r"""LOSS_MODE=${LOSS_MODE:-vanilla}
case $LOSS_MODE in
  vanilla|gpg)
    clip_low=0.2; clip_high=0.2 ;;
  gspo)  clip_low=3e-4
         clip_high=4e-4
         agg=seq-mean-token-mean ;;
  geo*) clip_low=0.4 clip_high=0.4 ;;
  *)
    clip_low=0.1 clip_high=${CLIP:-0.3}
esac
if [[ "$LOSS_MODE" == g* && "$LOSS_MODE" != gpg ]]; then ESTIMATOR=grpo; else ESTIMATOR=${ESTIMATOR:-gae}; fi
if [ -n "${agg:-}" ]; then AGG="actor.loss_agg_mode=$agg"; fi
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=$ESTIMATOR \
  actor.policy_loss.loss_mode=${LOSS_MODE} actor.clip_ratio_low=$clip_low actor.clip_ratio_high=$clip_high ${AGG:-} \
  trainer.experiment_name="run_${LOSS_MODE}_${ESTIMATOR^^}"
""",
    # functions, local names, loops over few words
    r"""add() { local key=$1; shift; ARGS+=("$key=$*"); }
function twice {
  local n=${1:-1}
  return_value=$((n * 2))
}
ARGS=()
for role in actor critic ref; do
  [ "$role" = critic ] && [ "${NO_CRITIC:-0}" = 1 ] && continue
  add $role.fsdp.param_offload ${OFFLOAD:-False}
done
twice ${TP:-2}
for i in {1..3}; do total=$((${total:-0} + i)); done
add trainer.logger console wandb
if (( return_value > 4 )); then add big yes; elif (( return_value == 4 )); then add big four; else add big no; fi
python -m verl.trainer.main_ppo "${ARGS[@]}" rollout.tp=$return_value x=$total n=${#ARGS[@]} \
  first=${ARGS[0]} last="${ARGS[-1]}"
""",
    # paths of the script and of the model
    r"""SCRIPT_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)
ROOT=$(cd "$SCRIPT_DIR/../.." && pwd)
MODEL_PATH=${MODEL_PATH:-"$HOME/models/Qwen2.5-7B.instruct"}
name=$(basename "$MODEL_PATH")
base=${MODEL_PATH##*/}
CONFIG_PATH=$(basename $(dirname $0))
if [ -z "$1" ]; then CONFIG_NAME="math"; else CONFIG_NAME=$1; fi
export PYTHONPATH=$ROOT:${PYTHONPATH:-}
python "$SCRIPT_DIR/main_grpo.py" --config-path $CONFIG_PATH --config-name $CONFIG_NAME \
  data.path=$PWD/data model.path=$MODEL_PATH name=${name%.*}-${base//./_} short=${base,,} out=`dirname $MODEL_PATH`/out
""",
    # words in one text, here-documents, a pipe, a subshell
    r"""set -e
EXTRA_ARGS=${EXTRA_ARGS:-"a.b=1 c.d=2"}
cat > runtime.yaml <<EOF
env: {A: "it's $EXTRA_ARGS"}
EOF
ulimit -n 256
(cd /nowhere 2>/dev/null; EXTRA_ARGS=other; TP=99) || true
WORLD=$(( ${NNODES:-1} * ${GPUS:-8} ))
[[ $WORLD -gt 8 ]] && MULTI=True || MULTI=False
[ $((WORLD % ${TP:-2})) -eq 0 ] || { echo "does not divide"; exit 1; }
ray job submit --address="http://127.0.0.1:8265" --runtime-env=runtime.yaml -- \
  python3 -m verl.trainer.main_ppo $EXTRA_ARGS "one=$EXTRA_ARGS" multi=$MULTI world=$WORLD \
  optional${NOTHING:+=set} ${NNODES:+nodes=$NNODES} 2>&1 |
  tee log.txt
""",
    # options by switches, nested conditions, sets of words
    r"""USE_KL=${USE_KL:-True}; REWARD=${REWARD:-em}; NNODES=${NNODES:-2}
OPTS="algorithm.kl=$USE_KL"
if [ "$USE_KL" = "True" ]; then
  if [ "$NNODES" -ge 2 ] && [ $REWARD != em ]; then OPTS+=" kl.coef=0.002"
  elif [[ $REWARD =~ ^e[a-z]$ ]]; then OPTS+=" kl.coef=0.001"; fi
elif ! [ "$NNODES" -lt 4 ]; then
  OPTS="$OPTS kl.nodes=many"
fi
i=0
while [ $i -lt $NNODES ]; do nodes="${nodes}${nodes:+,}node$i"; i=$((i+1)); (( i == 3 )) && break; done
until (( i <= 0 )); do (( i -= 2 )) || true; done
for ((k = 0; k < NNODES; k++)); do ks+=($k); done
set -- first "second one" third; shift
eval "python3 -m verl.trainer.main_ppo $OPTS nodes=[$nodes] i=$i ks=${ks[*]} two='$1' rest=$#"
""",
]
VARIABLES = {
    "DEVICE": ("gpu", "npu"),
    "INFER_BACKEND": ("sglang", "trtllm"),
    "LOSS_MODE": ("gspo", "geo_mean", "gpg", "dppo"),
    "NNODES": ("1", "4"),
    "TP": ("1", "4"),
    "USE_KL": ("False",),
    "REWARD": ("em", "math", "ex"),
    "EXTRA_ARGS": ("x=[1,2]",),
    "NO_CRITIC": ("1",),
    "MODEL_PATH": ("/models/a.b/Llama.3", "gpt2"),
}
"""What a user may set before a script, and to what."""
