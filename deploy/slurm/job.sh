#!/usr/bin/env bash
# A Dask cluster within one job of several nodes, and a program on it: sbatch [FLAGS] job.sh
# Defaults; flags of sbatch override them.
#SBATCH --job-name=dask-p2p
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
# On GPUs also --gpus-per-node=8.
set -euo pipefail

here=${DASK_P2P_DEPLOY:-$SLURM_SUBMIT_DIR} # the folder of transpose.py
interface=()                               # of the fast network; empty: Dask's choice
[ -z "${INTERFACE:-}" ] || interface=(--interface "$INTERFACE")
pool=${POOL:-60GiB}                      # of each GPU, a multiple of 2 MiB
run=$SLURM_SUBMIT_DIR/dask-$SLURM_JOB_ID # on a file system that all nodes share
file=$run/scheduler.json
scratch=${TMPDIR:-/tmp} # on a local disk of each node

mkdir -p "$run"
# The scheduler registers the plugins on all workers.
export DASK_DISTRIBUTED__SCHEDULER__PRELOAD='["dask_p2p.preload"]'

if [ "${SLURM_GPUS_ON_NODE:-0}" -gt 0 ]; then
  each=$SLURM_GPUS_ON_NODE
  export DASK_ARRAY__BACKEND=cupy
  worker=(dask cuda worker --rmm-pool-size "$pool" --set-rmm-allocator-for-libs cupy)
else
  each=$SLURM_CPUS_PER_TASK
  worker=(dask worker --nworkers "$each" --nthreads 1)
fi
if [ "${SLURM_MEM_PER_NODE:-0}" -gt 0 ]; then # MiB, from --mem; else workers share the node's memory
  worker+=(--memory-limit "$((SLURM_MEM_PER_NODE / each))MiB")
fi

srun --overlap --nodes=1 --ntasks=1 \
  dask scheduler --no-jupyter "${interface[@]}" --port 0 --dashboard-address :0 \
  --scheduler-file "$file" >"$run/scheduler.log" 2>&1 &
# Since 22.05 srun does not inherit --cpus-per-task from sbatch.
srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  "${worker[@]}" "${interface[@]}" --scheduler-file "$file" \
  --local-directory "$scratch" >"$run/workers.log" 2>&1 &
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

# Replace this program with yours.
python "$here/transpose.py" "$file" "$((each * SLURM_JOB_NUM_NODES))" &
program=$!

# The program ends first, unless the scheduler or the workers fail and it would wait for ever.
status=0
wait -n || status=$?
if kill -0 "$program" 2>/dev/null; then
  echo "The scheduler or the workers ended before the program. The ends of their logs:" >&2
  tail -n 20 "$run"/*.log >&2
  exit 1
fi
exit "$status"
