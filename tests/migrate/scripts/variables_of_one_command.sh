export PYTHONUNBUFFERED=1 HYDRA_FULL_ERROR=1
export VLLM_ATTENTION_BACKEND=XFORMERS # vllm + qwen2-7b with flash_attn has some issues
export BASE_MODEL='meta-llama/Llama-3.2-3B'
export EXPERIMENT_NAME=nq-search-r1-ppo-${REWARD:-em}
WAND_PROJECT='Search-R1'
PYTHONUNBUFFERED=1 NCCL_DEBUG=$WAND_PROJECT python3 -m verl.trainer.main_ppo \
    data.train_files=$DATA_DIR/train.parquet \
    actor.model.path=$BASE_MODEL \
    +trainer.val_only=false \
    retriever.url="http://127.0.0.1:8000/retrieve" \
    trainer.default_local_dir=verl_checkpoints/$EXPERIMENT_NAME \
    max_turns=${NNODES:-2} \
    2>&1 | tee $EXPERIMENT_NAME.log
