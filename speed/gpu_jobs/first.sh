# First command on the card, at most 460 s: bring .whl and .carry. OUT is the folder of the results.
set -o pipefail
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
export PYTHONPATH=/tmp/site:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,memory.free --format=csv | tee "$OUT/smi.txt"
timeout 70 python3 -m pytest -q -p no:cacheprovider tests/engines/test_device_gpu.py -k "recorded or seeds or checkpoint" \
  > "$OUT/tests.txt" 2>&1; tail -n 5 "$OUT/tests.txt" | cut -c1-300
timeout 270 python3 -m speed.gpu_jobs.peers_gpu "$OUT" --seconds 255 --settings A B pfl 2>&1 | cut -c1-300
timeout 50 python3 -m speed.gpu_jobs.resume "$OUT" --only resume 2>&1 | cut -c1-300
timeout 65 python3 -m speed.gpu_jobs.resume "$OUT" --only seeds --data-path .carry/cifar10 2>&1 | cut -c1-300
