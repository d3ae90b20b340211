#!/bin/bash
# A job of SLURM: Ray on the nodes of one allocation. It has not run on a real cluster yet.
#
# The plan: 1,000,000 rows of 418 + 128 tokens of mistralai/Mixtral-8x7B-Instruct-v0.1 on 3 x
# g6e.8xlarge (32 vCPUs, 256 GiB, 1 x l40s), the fewest that end within 24 hours (--deadline-hours).
# On each node up to 3,512 sequences at once, schedule micro_batches, 217.60 GiB of host memory.
# Predicted, not measured: about 1m44s to load, 16h59m00s to generate, 1 s to write; 2,094 generated
# tokens/s. Nodes cost 13.59 USD an hour (on demand, prices of July 2026; 2025 where spot is null),
# 231.12 USD for the job; head, disks and file system come on top.
#
# Written by:
#   raymoe plan --model mistralai/Mixtral-8x7B-Instruct-v0.1 --prompt-len 418 --gen-len 128 \
#       --num-rows 1000000 --hardware g6e.8xlarge --deadline-hours 24 --write-as slurm \
#       --write examples/slurm.sh
#
# `raymoe doctor examples/slurm.sh` says what is left to replace, and what an hour costs.
#
# Make its environment once, on a login node in the root of the checkout:
#
#   python3.11 -m venv ~/raymoe-env
#   ~/raymoe-env/bin/pip install ray==2.60.0 .
#   ~/raymoe-env/bin/ray get-auth-token --generate   # nodes join, and jobs run, with this token
#
# Start it with:
#
#   sbatch examples/slurm.sh
#
# Before that, replace PARTITION and ACCOUNT, and /data by a file system that all nodes see; copy to
# it what the command below reads there. Without --time, the partition's limit ends the job: submit
# it again.
#SBATCH --job-name=raymoe
#SBATCH --partition=PARTITION
#SBATCH --account=ACCOUNT
# As many as the plan has nodes, and all of each: cores, GPUs, and memory, which 0 stands for.
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node=1
# The limits of the nodes, not of the shell that submits: weights and KV cache are pinned.
#SBATCH --propagate=NONE
# What is finished is in the journal: with --resume, a job that is queued again goes on where it was.
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
. ~/raymoe-env/bin/activate
export RAY_AUTH_MODE=token
# This script runs on the first node: the address that Ray takes there.
RAY_ADDRESS="$(python -c 'import ray; print(ray.util.get_node_ip_address())'):6379"
export RAY_ADDRESS

# Does each node see it? Without --cpu-bind=none, a step may get one core.
srun --cpu-bind=none ls -d /data/

# The plan's node: 32 vCPUs, 256 GiB, 1 x l40s. The object store has 7.45 GiB instead of Ray's 30 %
# of the memory, which belongs to the KV cache; the memory is that of the node, of which raymoe uses
# 85 %, as planned.
node=(--num-gpus=1 --memory=274877906944 --object-store-memory=8000000000)
ray start --head --port=6379 "${node[@]}"
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" != 0 ]; then
  srun --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" --cpu-bind=none \
    ray start --address="$RAY_ADDRESS" --block "${node[@]}" &
fi
count() {
  python -c 'import ray; ray.init(log_to_driver=False); print(sum(n["Alive"] for n in ray.nodes()))'
}
until [ "$(count)" = "$SLURM_JOB_NUM_NODES" ]; do sleep 5; done
# One engine on each node (--num-actors).
raymoe generate --model mistralai/Mixtral-8x7B-Instruct-v0.1 --input /data/prompts --output /data/answers --id-column id --resume --num-actors 3 --device cuda --max-tokens 128 --price-per-hour 4.52856
