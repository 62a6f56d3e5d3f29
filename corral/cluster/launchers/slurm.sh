# --- what follows is the same in every script; what differs is set above

attempt=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0} # a job that Slurm starts again keeps its number
folder=$log_folder/$job_name-$attempt
head_file=$folder/head.json
log=$(readlink "/proc/$$/fd/1" || true) # this job's own, which the steps write to as well
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
ups=()   # processes of the steps that keep the nodes up, by rank
step=    # process of the step that is waited for
doing="starting"

# finish CODE REASON: stops the nodes, leaves, and says why in the last line of the log.
finish() {
  trap - EXIT
  trap : TERM
  if [ -n "$step" ]; then
    kill "$step" 2>/dev/null || true
    wait "$step" || true
  fi
  if [ "${#ups[@]}" -gt 0 ]; then
    # A signal to srun itself would kill the step at once, without a chance to stop Ray.
    scancel --quiet --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || true
    sleep 45 &
    local clock=$! up
    for up in "${ups[@]}"; do
      while is_running "$up" && is_running "$clock"; do wait -n || true; done
    done
    kill "$clock" "${ups[@]}" 2>/dev/null || true
  fi
  if [ -n "$container" ]; then # what is left of them, if anything
    srun --overlap --nodes="${#nodes[@]}" --ntasks-per-node=1 "$engine" rm --force "$container" >/dev/null 2>&1 || true
  fi
  rm -f "$head_file" "$head_file.token"
  echo "corral: job $SLURM_JOB_ID $2"
  exit "$1"
}

is_running() {
  kill -0 "$1" 2>/dev/null
}

# reason FILE: the last error that it tells of; where there is none, its last line, and what Slurm has to say.
reason() {
  tail -n 40 "$1" 2>/dev/null | awk '
    /^error: / { error = substr($0, 8) }
    /^(srun|slurmstepd)/ { slurm = " (" $0 ")"; next }
    NF { last = $0 }
    END { if (error) print error; else print last slurm }'
}

# up RANK: starts the node's part of the cluster, which stays until the job ends.
up() {
  local node=${nodes[$1]}
  srun "${srun_options[@]}" --job-name="up-$node" --nodelist="$node" \
    "${up_command[@]}" --head-file "$head_file" --id "$attempt" >"$folder/$node.log" 2>&1 &
  ups[$1]=$!
}

# await RANK...: until the step is over. A node of these ranks that goes down before ends the job.
await() {
  local code=0 rank
  while is_running "$step"; do
    for rank in "$@"; do
      is_running "${ups[rank]}" || finish 1 "failed while $doing: ${nodes[rank]}: $(reason "$folder/${nodes[rank]}.log")"
    done
    wait -n || true # the next step that ends, whichever it is
  done
  wait "$step" || code=$?
  step=
  return "$code"
}

# await_devices DEVICES NODES: until so many are there.
await_devices() {
  local code=0
  srun "${srun_options[@]}" --job-name=check --nodelist="${nodes[0]}" \
    "${check_command[@]}" "$1" --nodes "$2" --timeout "$check_timeout_s" --head-file "$head_file" &
  step=$!
  await "${!ups[@]}" || code=$?
  [ "$code" = 0 ] || finish "$code" "failed while $doing: $(reason "$log")"
}

# A signal to srun itself would kill the training at once, and containers do not get those of their engine's client.
stop_training() {
  local found
  if [ -n "$container" ]; then
    srun "${srun_options[@]}" --nodelist="${nodes[0]}" \
      "$engine" exec "$container" bash -c 'kill -TERM "$(cat /tmp/corral-train.pid)"'
    return
  fi
  found=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format="%j %i" | awk '$1 == "train" { print $2 }')
  if [ -n "$found" ]; then
    scancel --quiet --signal=TERM "$found" 2>/dev/null
  else
    kill "$step" # it has not begun
  fi
}

# Slurm's signal before the time limit, or the user's: `scancel --batch --signal=TERM JOB`.
stop() {
  local code=0 state
  trap : TERM
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T || true)
  if [ "$state" != RUNNING ]; then # a plain scancel ends all steps at once, and little time is left
    trap - EXIT
    rm -f "$head_file" "$head_file.token"
    echo "corral: job $SLURM_JOB_ID was cancelled while $doing"
    exit 143
  fi
  [ "$doing" = training ] || finish 143 "was stopped while $doing"
  echo "corral: job $SLURM_JOB_ID is to stop; the training saves a checkpoint first"
  stop_training || true
  await 0 || code=$?
  [ "$code" = 0 ] || finish "$code" "was stopped, and the training did not save itself: $(reason "$log")"
  finish 143 "was stopped; submit the script again to go on"
}

trap stop TERM
trap 'finish "$?" "failed while $doing: see above"' EXIT
mkdir -p "$folder"
echo "corral: job $SLURM_JOB_ID on ${nodes[*]}; the nodes' logs are in $folder"

doing="starting the head"
up 0
await_devices 0 1
if [ "${#nodes[@]}" -gt 1 ]; then
  doing="starting the other nodes"
  for rank in "${!nodes[@]}"; do
    [ "$rank" = 0 ] || up "$rank"
  done
fi
doing="waiting for $num_devices devices"
await_devices "$num_devices" "${#nodes[@]}"

doing=training
RAY_ADDRESS=$(sed -n 's/.*"address": "\([^"]*\)".*/\1/p' "$head_file")
export RAY_ADDRESS # which cluster is meant, should another job of yours run on the same node
code=0
srun "${srun_options[@]}" --job-name=train --nodelist="${nodes[0]}" "${train_command[@]}" &
step=$!
await 0 || code=$? # if another node goes down, it is the training that says so, or goes on without it
[ "$code" = 0 ] || finish "$code" "failed: $(reason "$log")"
finish 0 "is done"
