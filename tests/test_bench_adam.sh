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
