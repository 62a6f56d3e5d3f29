#!/bin/bash
if [ $# -gt 0 ]; then
    EXP=$1
    shift
else
    EXP=default_exp
fi
STEPS=${1:-100}
EXTRA=("$@")
python -m verl.trainer.main_ppo trainer.experiment_name=$EXP trainer.total_training_steps=$STEPS \
    num_extra=${#EXTRA[@]} "${EXTRA[@]}" "$@"
