#!/bin/bash
# spillway bench adam from the command line, and the library from Python where PyTorch is installed.
cd "$(dirname "$0")/.." || exit 1
build=${SPW_BUILD:-build/checked}
bin=$build/spillway
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-badam-XXXXXX")
trap 'rm -rf "$dir"' EXIT
n=0
ok() { n=$((n + 1)); if [ "$1" -eq 0 ]; then echo "ok $n - $2"; else echo "not ok $n - $2"; tail -n 12 "$dir/out" | sed 's/^/# /'; fi; }
timeout 120 "$bin" bench adam --smoke --optimizer all --threads 2 >"$dir/out" 2>&1
ok $? "bench adam --smoke"
[ "$(grep -Ec '^  (Adam|Adagrad|Lion|SGD) .* 0$' "$dir/out")" -eq 28 ]
ok $? "a row for every optimizer and format, nothing wrong"
timeout 120 "$bin" bench adam --smoke --json --format split --format split-int8 --isa scalar --grad bf16 --params 1e5 >"$dir/out" 2>&1
ok $? "bench adam --json"
for key in mparams_s gb_s ceiling_gb_s ratio_to_ceiling optimizer format threads isa; do
    [ "$(grep -c "\"$key\": " "$dir/out")" -eq 2 ]
    ok $? "every row has $key"
done
"$bin" bench adam --format int4 >"$dir/out" 2>&1; [ $? -eq 2 ] && grep -q 'int4' "$dir/out"; ok $? "an unknown format is refused"
"$bin" bench adam --isa mmx >"$dir/out" 2>&1; [ $? -eq 2 ]; ok $? "an unknown instruction set is refused"
"$bin" bench adam --check-factor 0 >"$dir/out" 2>&1; [ $? -eq 2 ]; ok $? "a factor of nothing is refused"
if "$bin" bench adam --smoke --format fp32 | grep -q 'isa avx'; then
    timeout 120 "$bin" bench adam --smoke --threads 1 --check-factor 0.001 >"$dir/out" 2>&1 && [ "$(grep -c '^# ok ' "$dir/out")" -ge 3 ]
    ok $? "the check passes where limits are low"
    timeout 120 "$bin" bench adam --smoke --threads 1 --format fp32 --format mixed-fp16 --isa avx2 --check-factor 1000 >"$dir/out" 2>"$dir/err"
    [ $? -eq 1 ] && grep -q '1 row(s) below' "$dir/err"
    ok $? "it fails where a limit is out of reach; a row without a limit does not count"
    [ "$(grep -c '^# again Adam fp32, 1 thread(s): .*; measured again$' "$dir/out")" -eq 2 ] && grep -q '^# BELOW Adam fp32, 1 thread(s): ' "$dir/out"
    ok $? "it names the row, measured three times"
    timeout 120 "$bin" bench adam --smoke --threads 1 --format split-int8 --json --check-factor 1000 >"$dir/out" 2>"$dir/err"
    [ $? -eq 1 ] || ! grep -q avx512 "$dir/out"
    ok $? "8-bit moments have a limit where they have a kernel"
    ! grep -v '^{.*}$' "$dir/out" >&2
    ok $? "with --json, only JSON on standard output"
else
    n=$((n + 1)); echo "ok $n - the check # skip no AVX2, no limits"
fi
case $build in
*asan* | *tsan*) n=$((n + 1)); echo "ok $n - from Python # skip the interpreter is not built for sanitizers" ;;
*)
    if python3 -c 'import torch' 2>/dev/null; then
        SPW_LIBRARY=$(realpath "$build")/libspillway.so timeout 120 python3 examples/pytorch_adam.py --check >"$dir/out" 2>&1
        ok $? "as an optimizer of PyTorch: as exact as its own, the same bits with any number of threads"
    else
        n=$((n + 1)); echo "ok $n - from Python # skip PyTorch is not installed"
    fi
    ;;
esac
echo "1..$n"
