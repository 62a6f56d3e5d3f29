add() { local key=$1; shift; ARGS+=("$key=$*"); }
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
