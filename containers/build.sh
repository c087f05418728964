#!/bin/sh
# The two steps of the Dockerfile. `tools`: LayerZero in a venv, the same for every image. `image`: lays out under /image
# what this image has beside its base.
set -eu
cd /source
root=/opt/layerzero
export PATH="$root/venv/bin:$PATH" LAYERZERO_STORE=$root/store
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PIP_ROOT_USER_ACTION=ignore
wheels=containers/wheelhouse
if ls $wheels/*.whl >/dev/null 2>&1; then
    unset PIP_EXTRA_INDEX_URL
    pip_source="--no-index --find-links $wheels"
    env_source="--offline --wheelhouse $wheels"
elif [ -z "${PIP_EXTRA_INDEX_URL:-}" ]; then
    unset PIP_EXTRA_INDEX_URL
    case ${ENVIRONMENT:-}.${VARIANT:-} in
    torch.cpu | zentorch.cpu)
        echo "PIP_EXTRA_INDEX_URL is not set: name PyTorch's CPU wheel index, or run containers/wheelhouse.sh before" >&2
        exit 1
        ;;
    esac
fi
install() { pip install --quiet --require-hashes --no-deps --only-binary :all: ${pip_source:-} -r "$1"; }

case $1 in
tools)
    python3 -m venv $root/venv
    install containers/locks/layerzero.txt
    pip install --quiet --no-deps --no-index --no-build-isolation .
    exit
    ;;
image) mkdir -p /image$root ;;
esac

if [ -n "$ENVIRONMENT" ]; then
    # The probe proves the environment, and compiles the modules that its worker will import. A GPU is not there when
    # images are built; a worker probes again when it joins.
    [ "$VARIANT" = cpu ] || no_probe=--no-probe
    lz env build "$ENVIRONMENT" --variant "$VARIANT" --installer pip ${env_source:-} ${no_probe:-}
    ln -s $root/store/envs/"$ENVIRONMENT"-* $root/environment
    ln -s $root/store/stage/* $root/code
    # Compile caches of this very environment, if somebody has exported them (docs/containers.md).
    for folder in $root/store/envs/"$ENVIRONMENT"-*; do name=${folder##*/}; done
    mkdir -p /image$root/warm
    for folder in containers/caches/"$ENVIRONMENT"-*; do
        [ -d "$folder" ] || continue
        if [ "${folder##*/}" = "$name" ]; then
            cp -r "$folder" /image$root/warm
        else
            echo "$folder is left out: it is of another lock or Python than $name" >&2
        fi
    done
    chmod -R a+rX /image$root/warm
    rm -rf $root/store/probes $root/store/*/.locks
    chmod 755 $root/store/envs/* $root/store/stage/*
    mv $root/store $root/environment $root/code /image$root
else
    [ -z "$EXTRA" ] || install "containers/locks/$EXTRA.txt"
    case $EXTRA in
    demo) cp -r examples /image$root ;;
    ray) cp containers/node.py /image$root ;;
    esac
    pip uninstall --quiet --yes setuptools pip
    mv $root/venv /image$root
fi

# A volume that is mounted for the first time takes owner and mode from the folder below it.
uid=${LAYERZERO_UID:-1000}
for folder in /run/layerzero /var/lib/layerzero /var/cache/layerzero; do
    mkdir -p /image$folder
    chmod 700 /image$folder
    chown "$uid:$uid" /image$folder
done
