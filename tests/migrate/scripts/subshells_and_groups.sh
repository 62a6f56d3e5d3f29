MODE=${LOSS_MODE:-vanilla}
( MODE=inner; export MODE; python3 prepare.py "$MODE" )
{ PREPARED=yes; python3 prepare.py "$MODE" "$PREPARED"; } 2>/dev/null
RESULT=$(echo "${MODE}-$(echo nested)")
(
  set -x
  cd /tmp
  TP=9
) &
wait
python3 -m verl.trainer.main_ppo mode=$MODE prepared=$PREPARED tp=${TP:-none} where=$(basename "$PWD") result=$RESULT
