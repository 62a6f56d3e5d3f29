set -e
die() { echo "error: $1" >&2; exit 1; }
TP=${TP:-2}
[ -n "$TP" ] || die "no TP"
if (( 8 % TP != 0 )); then die "8 devices are not a multiple of $TP"; fi
case "${INFER_BACKEND:-vllm}" in vllm | sglang | trtllm) ;; *) die "unknown engine" ;; esac
if [ "${INFER_BACKEND:-vllm}" = trtllm ] && [ "${NNODES:-1}" -gt 2 ]; then
    echo "one node only"
    exit 2
fi
test "$TP" -le 8 && test -z "" && ok=yes
python3 -m verl.trainer.main_ppo rollout.name=${INFER_BACKEND:-vllm} rollout.tp=$TP ok=$ok
