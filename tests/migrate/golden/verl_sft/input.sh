#!/usr/bin/env bash
set -xeuo pipefail
SP_SIZE=${SP_SIZE:-2}
USE_PEFT=${USE_PEFT:-1}
extra_args=()
if [ "${USE_PEFT}" = "1" ]; then
    extra_args+=("model.lora_rank=${LORA_RANK:-32}" "model.lora_alpha=16" "model.target_modules=all-linear")
fi
torchrun --standalone --nnodes=1 --nproc_per_node 8 \
    -m verl.trainer.sft_trainer \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.messages_key=messages \
    data.max_length=2048 data.truncation=right \
    data.use_dynamic_bsz=True data.max_token_len_per_gpu=8192 \
    optim.lr=1e-4 optim.lr_warmup_steps_ratio=0.05 optim.lr_scheduler_type=cosine optim.betas="'[0.9,0.95]'" \
    engine=fsdp \
    engine.ulysses_sequence_parallel_size=${SP_SIZE} \
    model.path=Qwen/Qwen3-8B \
    model.use_remove_padding=true \
    trainer.default_local_dir=/checkpoints/gsm8k-sft \
    trainer.project_name=gsm8k-sft trainer.experiment_name=gsm8k-sft-qwen3-8b \
    trainer.test_freq=50 trainer.save_freq=-1 \
    trainer.total_epochs=2 \
    "${extra_args[@]}" "$@"
