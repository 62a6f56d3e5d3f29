total=0
seeds=()
for seed in $(seq 1 3); do
    seeds+=("$seed")
    total=$((total + seed))
    [ $seed -eq ${TP:-2} ] && break
done
n=0
while true; do
    n=$((n + 1))
    if [ $n -lt ${NNODES:-2} ]; then continue; fi
    break
done
for ((i = ${#seeds[@]} - 1; i >= 0; i--)); do reversed+="${seeds[$i]}"; done
python3 -m verl.trainer.main_ppo seeds=[${seeds[*]}] total=$total n=$n reversed=$reversed
