"""Replacements for Slurm's commands, which start the tasks of a job on this machine; each node has a loopback address."""

import os
import sys
from pathlib import Path

from support.pages import ROOT

SBATCH = r"""#!/bin/bash
# sbatch FILE: run the job once for each task of its array, one after another.
option() { sed -n "s/^#SBATCH --$1=//p" "$2"; }
export SLURM_CPUS_PER_TASK=$(option cpus-per-task "$1") SLURM_NNODES=$(option nodes "$1")
export SLURM_JOB_NODELIST="node[1-${SLURM_NNODES:-1}]"
array=$(option array "$1")
[ -n "$array" ] || exec bash "$1"
for task in $(seq "${array%-*}" "${array#*-}"); do SLURM_ARRAY_TASK_ID=$task bash "$1" || exit 1; done
"""
SRUN = r"""#!/bin/bash
# srun [OPTIONS] COMMAND: run the tasks side by side. Node 1 is the head; --exclude leaves it out.
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
    folder.mkdir()
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
