USE_KL=${USE_KL:-True}; REWARD=${REWARD:-em}; NNODES=${NNODES:-2}
OPTS="algorithm.kl=$USE_KL"
if [ "$USE_KL" = "True" ]; then
  if [ "$NNODES" -ge 2 ] && [ $REWARD != em ]; then OPTS+=" kl.coef=0.002"
  elif [[ $REWARD =~ ^e[a-z]$ ]]; then OPTS+=" kl.coef=0.001"; fi
elif ! [ "$NNODES" -lt 4 ]; then
  OPTS="$OPTS kl.nodes=many"
fi
i=0
while [ $i -lt $NNODES ]; do nodes="${nodes}${nodes:+,}node$i"; i=$((i+1)); (( i == 3 )) && break; done
until (( i <= 0 )); do (( i -= 2 )) || true; done
for ((k = 0; k < NNODES; k++)); do ks+=($k); done
set -- first "second one" third; shift
eval "python3 -m verl.trainer.main_ppo $OPTS nodes=[$nodes] i=$i ks=${ks[*]} two='$1' rest=$#"
