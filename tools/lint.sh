#!/bin/sh
# Include direction, formatting and a few house rules. Prints what is wrong and exits 1, or prints "lint: ok".
cd "$(dirname "$0")/.." || exit 1
bad=0
say() { echo "lint: $*"; bad=1; }
git rev-parse --git-dir >/dev/null 2>&1 || { say "no git checkout: which files there are is not known"; exit 1; }

# What each module may include besides itself: base <- aio, cpu_adam, gpu <- offload <- runtime <- cli, examples, tests.
allowed() {
    case $1 in
    base) echo "base" ;;
    aio | cpu_adam | gpu) echo "base $1" ;;
    offload) echo "base aio cpu_adam gpu offload" ;;
    comm | nn | data | files) echo "base aio cpu_adam gpu offload comm nn data files" ;;
    runtime) echo "base aio cpu_adam gpu offload comm nn data files runtime" ;;
    *) echo "base aio cpu_adam gpu offload comm nn data files runtime spillway" ;;
    esac
}
module_of() {
    case $1 in
    runtime/base/*) echo base ;; runtime/comm/*) echo comm ;; runtime/nn/*) echo nn ;;
    runtime/data/*) echo data ;; runtime/files/*) echo files ;; runtime/*) echo runtime ;;
    */*) echo "${1%%/*}" ;;
    esac
}
for f in $(git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh' '*.cpp'); do
    m=$(module_of "$f")
    ok=" $(allowed "$m") "
    for inc in $(sed -n 's/^#include "spw_\([a-z_]*\)\.h".*/\1/p' "$f"); do
        case $inc in config | plan | engine | access | checkpoint | generate | monitor | rank_bench | reference) inc=runtime ;; tokenizer | chat) inc=data ;; preference) inc=gpu ;; codes) inc=base ;; esac
        case $ok in *" $inc "*) ;; *) say "$f: $m may not include spw_$inc.h" ;; esac
    done
    case $m in
    tests) ;;
    cli | examples) grep -n '_internal\.h"' "$f" /dev/null && say "$f: only the public API" ;;
    *)
        grep -nE '\b(printf|puts|exit|abort)\(' "$f" /dev/null | grep -vE 'runtime/base/status.c|^[^:]*:[0-9]*: *\*|//' &&
            say "$f: library code does not print, exit or abort"
        ;;
    esac
done
if command -v clang-format >/dev/null 2>&1; then
    git ls-files -co --exclude-standard '*.c' '*.h' '*.cu' '*.cuh' '*.cpp' | grep -v '^tests/vectors/' | xargs clang-format --dry-run -Werror >/tmp/lint.$$ 2>&1 ||
        { grep -o '^[^:]*:[0-9]*' /tmp/lint.$$ | sort -u | head -n 20; say "not formatted: make format"; }
    rm -f /tmp/lint.$$
else
    echo "lint: no clang-format, formatting not checked"
fi
[ $bad -eq 0 ] && echo "lint: ok"
exit $bad
