set -x
nproc_per_node=${TP:-8}
save_path=${SAVE_PATH:-/tmp/sft}
extra_args=()
[ "${USE_KL:-True}" = "True" ] && extra_args+=("model.lora_rank=32" "model.target_modules=all-linear")
torchrun --standalone --nnodes=${NNODES:-1} --nproc_per_node=$nproc_per_node \
     -m verl.trainer.fsdp_sft_trainer \
    data.prompt_key=extra_info data.prompt_dict_keys=['question'] \
    +data.response_dict_keys=['answer'] \
    model.partial_pretrain=${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct} \
    trainer.default_local_dir=$save_path "${extra_args[@]}" \
    trainer.logger='["console","wandb"]' $@
