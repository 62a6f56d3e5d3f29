ROOT=${ROOT:-${WORKSPACE:-$HOME}/verl}
DATA=${DATA:-"${ROOT}/data"}
OUT=${OUT:="$ROOT/out/${LOSS_MODE:-${REWARD:-none}}"}
BATCH=${BATCH:-$(( ${NNODES:-1} * ${TP:-2} * 16 ))}
python3 -m verl.trainer.main_ppo data.path=${DATA} out=$OUT data.train_batch_size=${BATCH} \
    unset=${NOTHING-none} empty=${EMPTY:-} alternative=${NNODES:+"nodes $NNODES"} "quoted=${REWARD:-"a b"}"
