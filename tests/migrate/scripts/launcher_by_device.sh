#!/usr/bin/env bash
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
