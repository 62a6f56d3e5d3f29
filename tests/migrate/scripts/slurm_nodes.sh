#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
nodes=$SLURM_JOB_NUM_NODES
: "${nodes:=4}"
gpus=${SLURM_GPUS_PER_NODE:-8}
WORLD=$((${NNODES:-4} * 8))
srun --overlap --nodes=1 --ntasks=1 \
    python3 -m verl.trainer.main_ppo trainer.nnodes=${NNODES:-4} trainer.n_gpus_per_node=8 world=$WORLD \
    batch=$((WORLD * ${TP:-2} > 64 ? 64 : WORLD)) 2>&1 | tee verl_demo_slurm.log
