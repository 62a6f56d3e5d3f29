offload=${USE_KL:-False}
python3 -m verl.trainer.main_ppo \
    {actor,ref}.fsdp_config.param_offload=$offload \
    rollout.{n,tp}={1..2} \
    critic.{a,b}${NNODES}=x 'literal.{a,b}=1' "quoted.{c,d}=$offload" plain{=1 steps={}
