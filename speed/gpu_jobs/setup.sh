# Once, in the root of the repository, on a machine with a network: bash speed/gpu_jobs/setup.sh [CIFAR10_FOLDER]
# Wheels that the machine with the card lacks into .whl (4.6 MB), CIFAR-10's train.parquet and test.parquet into
# .carry/cifar10 (18.5 MB) from the folder (or $CIFAR10). Both are ignored by git. TARGET_PYTHON: its Python (3.12).
set -e
images=${1:-$CIFAR10}
exclude=$(git rev-parse --git-path info/exclude)
mkdir -p .whl .carry/cifar10 "$(dirname "$exclude")"
for folder in /.whl/ /.carry/; do grep -qxF "$folder" "$exclude" 2>/dev/null || echo "$folder" >> "$exclude"; done
platforms=""
for version in 2_34 2_31 2_28 2_27 2_24 2_17; do platforms="$platforms --platform manylinux_${version}_x86_64"; done
download() {
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version "${TARGET_PYTHON:-3.12}" --implementation cp \
    $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d .whl "$@"
}
download pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5  # any run
download datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 simplejpeg==1.9.0                     # CIFAR-10 from parquet
download pfl==0.6.0 dp-accounting==0.5.1 prv-accountant==0.2.0 dm-tree==0.1.10                   # pfl-research
if [ -n "$images" ]; then cp "$images"/*.parquet .carry/cifar10/; fi
du -sh .whl .carry
