set -x
gsm8k_train=$HOME/data/gsm8k/train.parquet
math_train=$HOME/data/math/train.parquet
train_files="['$gsm8k_train', '$math_train']"
FILES=""
for part in train "test" extra; do
    FILES="${FILES}'/data/${REWARD:-em}/${part}.parquet',"
done
python3 -m verl.trainer.main_ppo data.train_files="$train_files" "data.val_files=[${FILES%,}]" \
    data.more=[$gsm8k_train,$math_train] critic.model.path=${MODEL_PATH:-deepseek-ai/base} $@
