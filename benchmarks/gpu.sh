#!/bin/sh
# Every figure of a GPU in one file: `benchmarks/gpu.sh [OUTPUT] [PYTHON]`, about 8 minutes on an H100.
#
# The compiled rows are first compiled in processes side by side, into a cache of this run alone:
# one after the other they would take longer than all measurements. What is timed runs by itself.
set -eu
output=${1:-gpu.json}
python=${2:-python}
here=$(dirname "$0")
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
export TORCHINDUCTOR_CACHE_DIR="$cache" PYTHONUNBUFFERED=1

compile() { # a part, and models
    part=$1
    shift
    for model in "$@"; do
        "$python" "$here/gpu.py" --compile-only --only "$part" --models "$model" &
        started="$started $!"
    done
}

# Two waves, as the training steps of all models do not fit a GPU at once.
started=
compile inference L B S Ti
compile latency B S Ti
for process in $started; do wait "$process"; done
started=
compile training B S Ti
for process in $started; do wait "$process"; done

"$python" "$here/gpu.py" --output "$output"
