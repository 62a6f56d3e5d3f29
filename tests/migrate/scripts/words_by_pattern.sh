MODEL=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
if [[ "$MODEL" == *[Qq]wen* && ! "$MODEL" == *Coder* ]]; then template=qwen
elif [[ "${MODEL,,}" =~ llama.?3 ]]; then template=llama3
elif [[ $MODEL == gpt2 || -z $MODEL ]]; then template=none
else template=default; fi
tag=${MODEL//\//_}
tag=${tag/Qwen/Q}
python3 -m verl.trainer.main_ppo data.template=$template tag=${tag} upper=${template^^} cap=${template^} \
    no_digits=${MODEL//[0-9]/} head=${MODEL%%/*} tail=${MODEL#*/} sub=${MODEL:+set}
