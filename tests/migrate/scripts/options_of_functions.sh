build_args() {
    local model=$1 tp=${2:-2}
    local -a common=(model.path="$model" rollout.tp="$tp")
    RESULT=("${common[@]}")
    case $model in
        *gpt*) RESULT+=(model.old=true); return 0 ;;
    esac
    RESULT+=("model.len=${#model}")
}
log() { echo "[$(date +%H)] $*" >&2; }
build_args "${MODEL_PATH:-Qwen/Qwen3-8B}" ${TP}
log "starting with ${#RESULT[@]} options"
python3 -m verl.trainer.main_ppo "${RESULT[@]}" count=${#RESULT[@]} second=${RESULT[1]}
