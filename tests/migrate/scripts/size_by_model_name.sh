MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-32B-Instruct}
case "$(basename "$MODEL_PATH")" in
    *[0-9]B* | gpt*)
        case $MODEL_PATH in
            *-7B* | *-8B*) size=${TP:-1} ;;
            *-32B*) size=${TP:-4}; OFFLOAD=True ;;
            *) size=${TP:-2} ;;
        esac
        ;;
    Llama*) size=8 ;;
    *) size=1; OFFLOAD=False ;;
esac
SHORT=${MODEL_PATH##*/}; SHORT=${SHORT%%-Instruct}
python3 -m verl.trainer.main_ppo model.path="$MODEL_PATH" rollout.tp=$size \
    fsdp.param_offload=${OFFLOAD:-False} trainer.experiment_name=grpo_${SHORT}_tp${size}
