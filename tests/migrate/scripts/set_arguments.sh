set -- data.a=1 "data.b=two words"
if [ "${REWARD:-em}" != em ]; then set -- "$@" "reward.name=$REWARD"; fi
for one in "$@"; do NAMES="${NAMES:+$NAMES,}${one%%=*}"; done
python3 -m verl.trainer.main_ppo "$@" names=[$NAMES] first="$1" count=$#
shift 2
python3 - "$@"
