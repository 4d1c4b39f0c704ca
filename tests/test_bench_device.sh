#!/bin/sh
# spillway bench gemm and attention on the cpu device and on the emulated one. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
bin=$build/spillway
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-bench-XXXXXX")
trap 'rm -rf "$dir"' EXIT
n=0
ok() { n=$((n + 1)); if [ "$1" -eq 0 ]; then echo "ok $n - $2"; else echo "not ok $n - $2"; sed 's/^/# /' "$dir/out"; fi; }
devices=cpu
case $build in /*) ;; *) build=$PWD/$build ;; esac
SPW_CUDA_PLUGIN=$build/emulated/spillway-cuda.so
[ -f "$SPW_CUDA_PLUGIN" ] && devices="cpu cuda"
export SPW_CUDA_PLUGIN
for device in $devices; do
    for kind in gemm attention; do
        timeout 300 "$bin" bench $kind --smoke --device $device --compute fp16 >"$dir/out" 2>&1
        ok $? "bench $kind on $device"
        awk '!/^#/ { rows++; bad += NF < 9 || $(NF - 3) <= 0 || $NF != 0 } END { exit bad || rows < 10 }' "$dir/out"
        ok $? "every row is whole and nothing is wrong"
    done
done
"$bin" bench gemm --smoke --device cpu --json >"$dir/out" 2>&1
python3 - "$dir/out" <<'PY'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
assert rows[0]["header"]["bench"] == "gemm" and len(rows) == 44
assert sum(r["what"] == "fp8" for r in rows[1:]) == 8
assert all(r["wrong"] == 0 and r["flop_s"] > 0 and r["peak_flop_s"] > 0 and len(r["samples_us"]) == r["reps"] for r in rows[1:])
PY
ok $? "--json has the same rows with their samples"
"$bin" bench gemm --smoke --device cpu >"$dir/out" 2>&1; ! grep -q 'no rows of fp8' "$dir/out"; ok $? "a device that has 8-bit floats does not say that it has none"
if [ "$devices" != cpu ]; then
    timeout 300 "$bin" bench gemm --smoke --device cuda >"$dir/out" 2>&1 && [ "$(awk '$6 == "fp8" && $NF == 0' "$dir/out" | wc -l)" -eq 8 ]; ok $? "rows of fp8 on the device"
    SPW_EMULATE_CAPABILITY=80 timeout 300 "$bin" bench gemm --smoke --device cuda >"$dir/out" 2>&1 && grep -q '^# no rows of fp8: .*8.9' "$dir/out" && ! grep -q ' fp8 ' "$dir/out"; ok $? "a device without says what it needs"
fi
"$bin" bench gemm --compute int8 >"$dir/out" 2>&1; [ $? -eq 2 ] && grep -q 'fp32, bf16 or fp16' "$dir/out"; ok $? "an unknown type is refused"
"$bin" bench attention --device cuda:x >"$dir/out" 2>&1; [ $? -eq 2 ] && grep -q 'cuda:x is unknown' "$dir/out"; ok $? "an unknown device is named"
echo "1..$n"
