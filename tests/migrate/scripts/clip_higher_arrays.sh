#!/usr/bin/env bash
set -euxo pipefail
project_name='DAPO'
exp_name="DAPO-${LOSS_MODE:-vanilla}-n${NNODES:-2}"
adv_estimator=grpo
use_kl_in_reward=False
kl_coef=0.0
clip_ratio_low=0.2
clip_ratio_high=0.28
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
enable_overlong_buffer=True
overlong_buffer_len=$((1024 * 4))
train_prompt_bsz=512
gen_prompt_bsz=$((train_prompt_bsz * 3))
sp_size=${TP:-8}
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length) / sp_size))
infer_ppo_max_token_len=$(((max_prompt_length + max_response_length) / sp_size * 2))
RAY_ADDRESS=${RAY_ADDRESS:-"http://localhost:8265"}
WORKING_DIR=${WORKING_DIR:-"${PWD}"}
RUNTIME_ENV=${RUNTIME_ENV:-"${WORKING_DIR}/verl/trainer/runtime_env.yaml"}
ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" \
    --working-dir "${WORKING_DIR}" \
    -- python3 -m recipe.dapo.main_dapo \
    data.gen_batch_size=${gen_prompt_bsz} \
    data.max_response_length=${max_response_length} \
    actor.clip_ratio_low=${clip_ratio_low} actor.clip_ratio_high=${clip_ratio_high} \
    algorithm.adv_estimator=${adv_estimator} algorithm.use_kl_in_reward=${use_kl_in_reward} \
    algorithm.kl_ctrl.kl_coef=${kl_coef} \
    actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} ref.max_token_len=${infer_ppo_max_token_len} \
    reward_model.overlong_buffer.enable=${enable_overlong_buffer} reward_model.overlong_buffer.len=${overlong_buffer_len} \
    trainer.experiment_name="${exp_name}" trainer.project_name="${project_name}"
