#!/bin/bash
# The runs that the kit makes on a GPU, small and on the emulated device: they come to their end, show what they are to show, and
# fail where a placement has other losses. And the kit's steps, with scripts in place of what they start. Speaks TAP.
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
check "six placements have the losses of the first, two those of late updates, and tiles' those of tiles and pieces" is 10 'to the last digit$'
check "Muon and preferences pass" kit kinds
check "each with the losses of its first placement in two others" is 4 '^(muon|dpo), (host|nvme): .*to the last digit$'
check "speed, offload and large pass" kit speed offload large
check "sixteen runs with their rates" is 16 ' ms a step, +[1-9][0-9]* tokens/s, '
check "a ratio for each turn" is 2 '^offloaded over on the device, turn [12]: [0-9.]+, where no step clips [0-9.]+$'
cat >"$dir/other" <<SH
#!/bin/sh
case "\$*" in *nvme_path*) exec "$spw" "\$@" --set spillway.seed=2 ;; esac
exec "$spw" "\$@"
SH
chmod +x "$dir/other"
spw=$dir/other
kit places
check "other losses are a failure" [ $? -eq 1 ]
check "and named" is 5 '^FAILED: (state (nvme|mixed|gradients)|tile_tokens=12|tile_vocab=128): other losses'

# A profile, of what a measuring program says.
mkdir "$dir/path"
cat >"$dir/path/ncu" <<'SH'
#!/bin/sh
echo "==PROF== connected"
echo '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
for t in 1,000 2,000 3,000; do echo '"0","5","spillway","h","void norm<a, 0>(T1 *, b)","1","15","(256, 1, 1)","(1, 1, 1)","0","9.0","x","gpu__time_duration.sum","ns","'$t'"'; done
echo '"0","5","spillway","h","gemm","1","15","(256, 1, 1)","(1, 1, 1)","0","9.0","x","gpu__time_duration.sum","us","18.0"'
SH
chmod +x "$dir/path/ncu"
PATH=$dir/path:$PATH kit profile
check "a profile adds up each kernel's launches" [ $? -eq 0 ] && is 2 '^ 25\.0% +3 times +2\.0 us  void norm<a, 0>' && is 2 ': 4 launches, 0\.0 ms$'

# What the kit brings along is what a machine may lack, not what its own libraries are linked with.
mkdir -p "$dir/build/tests"
cp "$build/spillway" "$dir/build/spillway"
for program in test_cuda test_link test_gpu_ops test_gpu_attention; do cp "$build/spillway" "$dir/build/tests/$program"; done
cp "$build/emulated/spillway-cuda.so" "$dir/build/"
pack() { sh tests/gpu_kit.sh "$dir/build" "$dir/packed" >"$dir/out" 2>&1; }
check "a kit is packed" pack
ls "$dir/packed/lib" >"$dir/out"
check "with libraries" grep -q '^libjansson' "$dir/out"
check "but not those of the compiler and of C" is 0 '^(libc|libm|libgcc_s|libstdc\+\+|ld-linux.*)\.so'

# Steps: a type that fails has its tests run one by one; logs lie in OUT; without cuBLASLt nothing is measured.
mkdir -p "$dir/kit/bin" "$dir/kit/lib" "$dir/logs"
cp tests/gpu_run.sh "$dir/kit/run.sh"
cat >"$dir/kit/bin/test_cuda" <<'SH'
#!/bin/sh
case "$*" in
*--about*) [ -n "${DEVICE_SAYS-a device}" ] || { echo "SKIP no driver"; exit 77; }; echo "# ${DEVICE_SAYS-a device, cuBLASLt}" ;;
*--list*) echo test_a; echo test_b ;;
*bf16*--only\ test_a*) echo "a alone passes" ;;
*bf16*) echo "bf16 fails"; exit 3 ;;
*) echo "passes: $*" ;;
esac
SH
printf '#!/bin/sh\nexit 77\n' >"$dir/kit/bin/test_link"
printf '#!/bin/sh\necho "measured $*"\n' >"$dir/kit/bin/spillway"
printf '#!/bin/sh\nshift 2\necho "whole runs: $*"\n' >"$dir/kit/train.sh"
chmod +x "$dir/kit/bin/"* "$dir/kit/train.sh"
steps() { OUT=$dir/logs sh "$dir/kit/run.sh" "$@" >"$dir/out" 2>&1; }
steps ops links
check "a type that fails fails the kit" [ $? -eq 1 ]
check "its tests ran one by one" is 1 '^== ops-bf16-test_b failed \(3\)$'
check "and one of them passed" grep -qx 'a alone passes' "$dir/logs/kit.log"
check "all that was said is in one file" [ "$(echo "$dir/logs/"*) $(grep -cE '^(== |bf16 fails|a alone)' "$dir/logs/kit.log")" = "$dir/logs/kit.log 9" ]
check "other types went on" grep -qx 'passes: --type fp16' "$dir/logs/kit.log"
check "links without NCCL are skipped by name" is 1 '^== links: skipped$'
check "what measures is measured" steps rates runs speed
check "six rates and four kinds of runs" [ "$(grep -cE '^(measured bench|whole runs: )' "$dir/logs/kit.log")" -eq 10 ]
steps --within 0 speed
check "what there is no time for is a failure" [ $? -eq 1 ] && is 1 '^== speed: no time is left$'
steps ops=test_a
check "one test of each type" [ $? -eq 0 ] && is 3 '^== test_a-(fp32|bf16|fp16): '
steps test
check "everything at once fails where a part does" [ $? -eq 1 ]
check "and is each of its parts" [ "$(grep -cE '^(passes: --type|whole runs: (places|curves|kinds)$|a alone)' "$dir/logs/kit.log")" -eq 6 ]
DEVICE_SAYS="a device" steps rates
check "nothing is measured without cuBLASLt" [ $? -eq 1 ] && is 1 '^== no cuBLASLt was found: nothing is measured$'
DEVICE_SAYS='' steps ops
check "no GPU is a skip" [ $? -eq 77 ]
steps nonsense
check "an unknown step is named" is 1 '^no step nonsense$'
echo "1..$n"
