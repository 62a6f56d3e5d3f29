LR=1e-6
NAME="run $LR"
CMD="python3 -m verl.trainer.main_ppo \
  actor.optim.lr=$LR \
  trainer.experiment_name='$NAME' \
  trainer.logger=\"['console','wandb']\""
[ "${NNODES:-1}" -gt 1 ] && CMD+=" trainer.nnodes=$NNODES"
eval $CMD
