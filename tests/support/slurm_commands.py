"""Replacements for Slurm's commands, which start the tasks of a job on this machine; each node has a loopback address."""

import os
import sys
from pathlib import Path

from support.pages import ROOT

SBATCH = r"""#!/bin/bash
# sbatch [--parsable] [--array=A-B] [--dependency=afterok:JOB] FILE, or --wrap COMMAND instead of FILE: run the job at once,
# with the tasks of its array side by side. Unlike Slurm's command, it ends with the job, and fails if the job does.
jobs=$(dirname "$0")/jobs
parsable=; array=; after=; wrapped=; script=
while [ $# -gt 0 ]; do
  case "$1" in
    --parsable) parsable=1 ;;
    --array=*) array=${1#*=} ;;
    --dependency=afterok:*) after=${1##*:} ;;
    --wrap) wrapped=$2; shift ;;
    -*) echo "sbatch: unknown option $1" >&2; exit 1 ;;
    *) script=$1 ;;
  esac
  shift
done
mkdir -p "$jobs"
id=1; until mkdir "$jobs/$id" 2> /dev/null; do id=$((id + 1)); done
if [ -n "$wrapped" ]; then script=$jobs/$id/script; printf '#!/bin/bash\n%s\n' "$wrapped" > "$script"; fi
[ -n "$parsable" ] && echo "$id" || echo "Submitted batch job $id"
if [ -n "$after" ] && ! [ -e "$jobs/$after/succeeded" ]; then echo "DependencyNeverSatisfied" >&2; exit 1; fi
option() { sed -n "s/^#SBATCH --$1=//p" "$script"; }
export SLURM_JOB_ID=$id SLURM_CPUS_PER_TASK=$(option cpus-per-task) SLURM_NNODES=$(option nodes)
export SLURM_JOB_NODELIST="node[1-${SLURM_NNODES:-1}]"
array=${array:-$(option array)}
status=0
if [ -z "$array" ]; then
  bash "$script" > "slurm-$id.out" 2>&1 || status=1
else
  export SLURM_ARRAY_TASK_COUNT=$((${array#*-} - ${array%-*} + 1))
  for task in $(seq "${array%-*}" "${array#*-}"); do
    SLURM_ARRAY_TASK_ID=$task bash "$script" > "slurm-${id}_$task.out" 2>&1 &
  done
  for process in $(jobs -p); do wait "$process" || status=1; done
fi
[ $status = 0 ] && touch "$jobs/$id/succeeded" || cat "slurm-$id"*.out >&2
exit $status
"""
SRUN = r"""#!/bin/bash
# srun [OPTIONS] COMMAND: run the tasks side by side. Node 1 is the head; --exclude leaves it out. The node of the array
# task FAKE_DEAD_TASK is dead.
[ "$SRUN_CPUS_PER_TASK" = "$SLURM_CPUS_PER_TASK" ] || { echo "srun: the step has one core" >&2; exit 1; }
[ -n "$FAKE_DEAD_TASK" ] && [ "$FAKE_DEAD_TASK" = "$SLURM_ARRAY_TASK_ID" ] && exit 1
tasks=1; first=1
while [[ "$1" == --* ]]; do
  case "$1" in
    --ntasks=*) tasks=${1#*=} ;;
    --exclude=*) first=2 ;;
  esac
  shift
done
for number in $(seq "$first" $((first + tasks - 1))); do FAKE_NODE=$number "$@" & done
trap 'kill $(jobs -p)' TERM
status=0
for process in $(jobs -p); do wait "$process" || status=$?; done
wait
exit $status
"""
SCONTROL = r"""#!/bin/bash
# scontrol show hostnames LIST
for number in $(seq 1 "$SLURM_NNODES"); do echo "node$number"; done
"""
HOSTNAME = r"""#!/bin/bash
echo "127.0.0.$((FAKE_NODE + 1)) 192.0.2.1"
"""
RAY = r"""#!/bin/bash
# Two stores of the usual size do not fit on one machine.
if [ "$1" = start ]; then set -- "$@" --object-store-memory=150000000 --disable-usage-stats; fi
exec "{python}" -m ray.scripts.scripts "$@"
"""
UNSKEW = r"""#!/bin/bash
exec "{python}" -m unskew "$@"
"""


def install(folder: Path) -> dict[str, str]:
    """Write the commands to a folder and return the environment in which they are found."""
    folder.mkdir(exist_ok=True)
    commands = {
        "sbatch": SBATCH,
        "srun": SRUN,
        "scontrol": SCONTROL,
        "hostname": HOSTNAME,
        "ray": RAY,
        "unskew": UNSKEW,
    }
    for name, text in commands.items():
        (folder / name).write_text(text.replace("{python}", sys.executable))
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
