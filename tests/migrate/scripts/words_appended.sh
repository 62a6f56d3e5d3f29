ARGS="trainer.nnodes=${NNODES:-1}"
ARGS="$ARGS trainer.n_gpus_per_node=8"
ARGS+=" data.train_batch_size=$((${NNODES:-1} * 128))"
if [ "${USE_KL:-True}" = True ]; then
  ARGS="${ARGS} actor.use_kl_loss=True \
        actor.kl_loss_coef=0.001"
fi
[ "$REWARD" == "math" ] && ARGS="$ARGS reward.path=math.py"
[[ -n $EXTRA_ARGS ]] && ARGS="$ARGS $EXTRA_ARGS"
CMD="python3 -m verl.trainer.main_ppo $ARGS"
echo "$CMD"
$CMD
