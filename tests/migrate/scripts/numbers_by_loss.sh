LOSS_MODE=${LOSS_MODE:-vanilla}
case $LOSS_MODE in
  vanilla|gpg)
    clip_low=0.2; clip_high=0.2 ;;
  gspo)  clip_low=3e-4
         clip_high=4e-4
         agg=seq-mean-token-mean ;;
  geo*) clip_low=0.4 clip_high=0.4 ;;
  *)
    clip_low=0.1 clip_high=${CLIP:-0.3}
esac
if [[ "$LOSS_MODE" == g* && "$LOSS_MODE" != gpg ]]; then ESTIMATOR=grpo; else ESTIMATOR=${ESTIMATOR:-gae}; fi
if [ -n "${agg:-}" ]; then AGG="actor.loss_agg_mode=$agg"; fi
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=$ESTIMATOR \
  actor.policy_loss.loss_mode=${LOSS_MODE} actor.clip_ratio_low=$clip_low actor.clip_ratio_high=$clip_high ${AGG:-} \
  trainer.experiment_name="run_${LOSS_MODE}_${ESTIMATOR^^}"
