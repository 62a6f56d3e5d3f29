nodes=${NNODES:-1}
(( nodes > 1 )) && backend=nccl || backend=gloo
offload=$(( nodes >= 4 ? 0 : 1 ))
mini=$((256 / (nodes > 2 ? 2 : 1)))
let "epochs = nodes * 2 + 1"
count=0
(( count += 3 ))
(( count++ ))
python3 -m verl.trainer.main_ppo comm=$backend offload=$offload mini=$mini epochs=$epochs count=$count \
    hex=$((0x10 | nodes)) shifted=$((1 << nodes)) negative=$((-7 / 2)) power=$((2 ** nodes)) both=$((nodes && 0))
