# Second command, at once after the first on the same machine, at most 310 s: bring .whl and .carry. A run that the time limit
# interrupts continues when the command is given again on this machine.
set -o pipefail
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
timeout 165 python3 -m speed.gpu_jobs.accuracy "$OUT" --data-path .carry/cifar10 --run /tmp/accuracy --eval-every 25 \
  > "$OUT/accuracy.txt" 2>&1; tail -n 3 "$OUT/accuracy.txt" | cut -c1-400
timeout 135 python3 -m speed.gpu_jobs.peers_gpu "$OUT" --seconds 120 --settings pfllib flsim 2>&1 | cut -c1-300
