IMAGE=verlai/verl:app-${INFER_BACKEND:-vllm}
MOUNTS="-v $HOME:/root -v /data:/data"
docker run --rm --gpus all $MOUNTS --shm-size="10g" "$IMAGE" \
    bash -c "cd /root/verl && python3 -m verl.trainer.main_ppo trainer.nnodes=${NNODES:-1} \
        trainer.experiment_name='in a container' data.path=\$HOME/data"
docker exec verl env X=1 python3 -m verl.trainer.main_ppo trainer.nnodes=1
