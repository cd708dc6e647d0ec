# Second command, at once after the first on the same machine, at most 300 s: bring .whl and .carry. It continues the run of
# the accuracy if the first command did not finish it.
set -o pipefail
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
timeout 60 python3 -m speed.gpu_jobs.resume "$OUT" --only seeds --data-path .carry/cifar10 2>&1 | cut -c1-300
timeout 180 python3 -m speed.gpu_jobs.peers_gpu "$OUT" --seconds 170 --settings pfllib flsim 2>&1 | cut -c1-300
timeout 60 python3 -m speed.gpu_jobs.accuracy "$OUT" --data-path .carry/cifar10 --run /tmp/accuracy --eval-every 50 \
  > "$OUT/accuracy.txt" 2>&1; tail -n 3 "$OUT/accuracy.txt" | cut -c1-400
