#!/usr/bin/env bash
# A Dask cluster within one job of several nodes, and a program on it: sbatch [FLAGS] job.sh
# These are defaults; flags of sbatch come before them.
#SBATCH --job-name=dask-p2p
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
# On GPUs also --gpus-per-node=8.
set -euo pipefail

here=${DASK_P2P_DEPLOY:-$SLURM_SUBMIT_DIR} # where transpose.py is
interface=()                               # of the fast network; Dask's choice if not given
[ -z "${INTERFACE:-}" ] || interface=(--interface "$INTERFACE")
pool=${POOL:-60GiB}                      # of each GPU, a multiple of 2 MiB
run=$SLURM_SUBMIT_DIR/dask-$SLURM_JOB_ID # on a file system that all nodes see
file=$run/scheduler.json
scratch=${TMPDIR:-/tmp} # on a disk of each node's own

mkdir -p "$run"
# The scheduler puts the plugins on all workers.
export DASK_DISTRIBUTED__SCHEDULER__PRELOAD='["dask_p2p.preload"]'

if [ "${SLURM_GPUS_ON_NODE:-0}" -gt 0 ]; then
  each=$SLURM_GPUS_ON_NODE
  export DASK_ARRAY__BACKEND=cupy
  worker=(dask cuda worker --rmm-pool-size "$pool" --set-rmm-allocator-for-libs cupy)
else
  each=$SLURM_CPUS_PER_TASK
  worker=(dask worker --nworkers "$each" --nthreads 1)
fi
if [ "${SLURM_MEM_PER_NODE:-0}" -gt 0 ]; then # MiB, of --mem; else workers share the node's
  worker+=(--memory-limit "$((SLURM_MEM_PER_NODE / each))MiB")
fi

srun --overlap --nodes=1 --ntasks=1 \
  dask scheduler --no-jupyter "${interface[@]}" --port 0 --dashboard-address :0 \
  --scheduler-file "$file" >"$run/scheduler.log" 2>&1 &
# Since 22.05 srun does not take the processors of a task from sbatch.
srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  "${worker[@]}" "${interface[@]}" --scheduler-file "$file" \
  --local-directory "$scratch" >"$run/workers.log" 2>&1 &
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

# Your program in the place of this one.
python "$here/transpose.py" "$file" "$((each * SLURM_JOB_NUM_NODES))" &
program=$!

# It ends first, unless scheduler or workers cannot go on. Then it would wait for them in vain.
status=0
wait -n || status=$?
if kill -0 "$program" 2>/dev/null; then
  echo "The scheduler or the workers ended before the program. The last of what they said:" >&2
  tail -n 20 "$run"/*.log >&2
  exit 1
fi
exit "$status"
