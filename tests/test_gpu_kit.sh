#!/bin/bash
# The runs that the kit makes on a GPU, small and on the emulated device: they come to their end, show what they are to show, and
# fail where a placement has other losses. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
[ -f "$build/emulated/spillway-cuda.so" ] || { echo "1..1"; echo "ok 1 - gpu kit # SKIP no C++ compiler when this was built"; exit 77; }
case $build in *asan | *tsan) echo "1..1"; echo "ok 1 - gpu kit # SKIP minutes under a sanitizer"; exit 77 ;; esac
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-kit-XXXXXX")
trap 'rm -rf "$dir"' EXIT
SPW_CUDA_PLUGIN=$(realpath "$build/emulated/spillway-cuda.so")
spw=$(realpath "$build/spillway")
export SPW_CUDA_PLUGIN SPW_KIT_DIR=$dir OPENBLAS_NUM_THREADS=1
awk 'BEGIN { for (i = 0; i < 4000; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
n=0
check() {
    n=$((n + 1)) name=$1
    shift
    if "$@"; then echo "ok $n - $name"; else echo "not ok $n - $name"; sed 's/^/# /' "$dir/out" | tail -n 12; fi
}
kit() { bash tests/gpu_train.sh --small "$spw" "$dir/text.txt" "$@" >"$dir/out" 2>&1; }
# is COUNT PATTERN: so many lines of the output match.
is() { [ "$(grep -cE "$2" "$dir/out")" -eq "$1" ]; }
check "curves and places pass" kit curves places
check "twenty losses of three runs" is 20 '^[0-9]+ [0-9.]+ [0-9.]+ [0-9.]+$'
check "four placements have the losses of the first" is 4 'to the last digit$'
check "speed and offload pass" kit speed offload
check "nine runs with their rates" is 9 ' ms a step, +[1-9][0-9]* tokens/s, '
check "a ratio for each turn" is 2 '^offloaded over on the device, turn [12]: [0-9.]+$'
cat >"$dir/other" <<SH
#!/bin/sh
case "\$*" in *nvme_path*) exec "$spw" "\$@" --set spillway.seed=2 ;; esac
exec "$spw" "\$@"
SH
chmod +x "$dir/other"
spw=$dir/other
kit places
check "other losses are a failure" [ $? -eq 1 ]
check "and named" is 2 '^FAILED: state (nvme|mixed): other losses'
echo "1..$n"
