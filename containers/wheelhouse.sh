#!/bin/sh
# Fill containers/wheelhouse, so that images build without a network: sh containers/wheelhouse.sh [NAME.VARIANT | EXTRA ...]
# Without words: what docker-compose.yml's cpu profile needs. EXTRA: a further lock of containers/locks, `ray`.
# Wheels come through pip as it is configured here; each must have the hash that its lock has.
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- torch.cpu mlx.cpu onnxruntime.cpu tokenizers-0.23.cpu
for name in layerzero demo "$@"; do
    lock=containers/locks/$name.txt
    [ -e "$lock" ] || lock=src/layerzero/envs/locks/$name.txt
    echo "== $lock"
    # One at a time: they are of environments that conflict.
    "${PYTHON:-python3}" -m pip download --quiet --require-hashes --no-deps --only-binary :all: --python-version 3.11 \
        --dest "${WHEELHOUSE:-containers/wheelhouse}" --requirement "$lock"
done
