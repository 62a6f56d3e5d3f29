#! /bin/bash
set -x
tabs 4 2>/dev/null
export VLLM_ATTENTION_BACKEND=XFORMERS
export RAY_DEDUP_LOGS=0
CONFIG_PATH="$( cd "$( dirname "${BASH_SOURCE[0]:-$0}" )" && pwd )"
REPO_PATH=$(dirname $(dirname "$CONFIG_PATH"))
MEGATRON_PATH=/opt/Megatron-LM
export PYTHONPATH=${REPO_PATH}:${MEGATRON_PATH}:$PYTHONPATH
if [ -z "$1" ]; then
    CONFIG_NAME="${REWARD:-em}-maxlen-16384"
else
    CONFIG_NAME=$1
fi
python ${REPO_PATH}/examples/main_grpo.py --config-path ${CONFIG_PATH}/config/ --config-name $CONFIG_NAME
