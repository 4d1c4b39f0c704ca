#!/bin/sh
# Runs every test program of one build and counts. usage: run.sh BUILD_DIR [NAME...]
# A C test speaks TAP (cmocka); a script test is one result by its exit code, 77 for "cannot run here".
build=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 1
SPW_BUILD=$root/$build
export SPW_BUILD
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 TSAN_OPTIONS=halt_on_error=1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
pass=0 fail=0 skip=0
want() { [ $# -eq 1 ] && return 0; t=$1; shift; for n in "$@"; do [ "$n" = "$t" ] && return 0; done; return 1; }
tally() { # name rc log seconds
    p=$(grep -c '^ok ' "$3") s=$(grep -ci '^ok .*# skip' "$3") f=$(grep '^not ok ' "$3" | grep -vci '# skip') t=$(grep -ci '^not ok .*# skip' "$3")
    p=$((p - s)) s=$((s + t)) # cmocka says "not ok" of what it skipped
    if [ $((p + f + s)) -eq 0 ] || { [ "$2" -ne 0 ] && [ "$2" -ne 77 ] && [ "$f" -eq 0 ]; }; then f=$((f + 1)); fi
    pass=$((pass + p)) fail=$((fail + f)) skip=$((skip + s))
    echo "$1: $p passed, $f failed, $s skipped ($4 s)"
    [ "$f" -gt 0 ] && { echo "--- $1 (exit $2)"; grep -v '^ok ' "$3" | tail -n 60; echo "---"; }
}
for bin in "$build"/tests/test_*; do
    [ -x "$bin" ] && [ -f "$bin" ] || continue
    case $bin in *.o | *.d) continue ;; esac
    name=$(basename "$bin")
    [ -f "tests/$name.c" ] || continue
    [ $# -gt 0 ] && { want "$name" "$@" || continue; }
    t0=$(date +%s)
    CMOCKA_MESSAGE_OUTPUT=TAP timeout 900 "$bin" >"$out/log" 2>&1 </dev/null
    tally "$name" $? "$out/log" $(($(date +%s) - t0))
done
for script in tests/test_*.sh; do
    [ -f "$script" ] || continue
    name=$(basename "$script" .sh)
    [ $# -gt 0 ] && { want "$name" "$@" || continue; }
    t0=$(date +%s)
    timeout 900 bash "$script" >"$out/log" 2>&1 </dev/null
    tally "$name" $? "$out/log" $(($(date +%s) - t0))
done
echo "$pass passed, $fail failed, $skip skipped"
[ "$fail" -eq 0 ]
