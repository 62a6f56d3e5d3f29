# an example
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo `# the estimator` \
    data.train_batch_size=${TP:-1024}#7 \
    `# data.val_files=none` \
    trainer.note="# not a comment" \
    trainer.last=1 # a comment \
trainer.lost=1
python3 -c 'print("done")' # the end
