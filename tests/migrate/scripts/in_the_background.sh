LOG="$(date +%Y%m%d)_${LOSS_MODE:-vanilla}.log"
[ "${LOG##*.}" = log ] || exit 1
trap 'echo interrupted' INT TERM
nohup python3 -m verl.trainer.main_ppo \
    trainer.experiment_name="a${LOG%.log}" \
    trainer.steps=10 > "$LOG" 2>&1 &
PID=x
wait
