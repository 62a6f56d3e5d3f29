set -e
EXTRA_ARGS=${EXTRA_ARGS:-"a.b=1 c.d=2"}
cat > runtime.yaml <<EOF
env: {A: "it's $EXTRA_ARGS"}
EOF
ulimit -n 256
(cd /nowhere 2>/dev/null; EXTRA_ARGS=other; TP=99) || true
WORLD=$(( ${NNODES:-1} * ${GPUS:-8} ))
[[ $WORLD -gt 8 ]] && MULTI=True || MULTI=False
[ $((WORLD % ${TP:-2})) -eq 0 ] || { echo "does not divide"; exit 1; }
ray job submit --address="http://127.0.0.1:8265" --runtime-env=runtime.yaml -- \
  python3 -m verl.trainer.main_ppo $EXTRA_ARGS "one=$EXTRA_ARGS" multi=$MULTI world=$WORLD \
  optional${NOTHING:+=set} ${NNODES:+nodes=$NNODES} 2>&1 |
  tee log.txt
