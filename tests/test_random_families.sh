#!/bin/bash
# Random small models of every family against transformers: logits, loss and gradients to 1e-5 of what it computes in double, or to
# what rounding leaves of its fp32 (test_families.c), from weights as it writes them. SPW_SEED= and SPW_CASES= replay or widen a
# run. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
export OPENBLAS_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
python3 -c 'import torch, transformers, safetensors' 2>/dev/null || { echo "no transformers here"; exit 77; }
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-families-XXXXXX")
trap 'rm -rf "$dir"' EXIT
seed=${SPW_SEED:-$(($(date +%s) % 1000000))} cases=${SPW_CASES:-25}
echo "# SPW_SEED=$seed SPW_CASES=$cases"
python3 tests/make_family_vectors.py --random "$seed" "$cases" "$dir" >"$dir/log" 2>&1 || { sed 's/^/# /' "$dir/log" | tail -n 20; echo "not ok 1 - models are made"; echo "1..1"; exit 1; }
n=0
for folder in "$dir"/*/; do
    n=$((n + 1))
    if "$build/tests/test_families" "${folder%/}" >"$dir/out" 2>&1; then echo "ok $n - $(basename "$folder")"; else
        echo "not ok $n - $(basename "$folder")"
        sed 's/^/# /' "$dir/out" "$folder/config.json" | head -n 60
    fi
done
echo "1..$n"
