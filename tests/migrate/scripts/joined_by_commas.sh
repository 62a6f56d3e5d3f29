GPUS=(0 1 2 3)
[ "${TP:-2}" = 4 ] && GPUS+=(4 5 6 7)
export CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${GPUS[*]}")
LOGGERS=(console wandb)
joined=$(IFS=','; echo "${LOGGERS[*]}")
python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=${#GPUS[@]} trainer.logger=[${joined}] \
    devices="[$CUDA_VISIBLE_DEVICES]" last=${GPUS[-1]} first=${GPUS[0]} all="${GPUS[*]}"
