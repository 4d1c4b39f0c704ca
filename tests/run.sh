#!/bin/sh
# Runs every test program of one build and counts. usage: run.sh BUILD_DIR [NAME...]; SPW_TEST_WITHOUT: files to leave out
# A C test speaks TAP (cmocka); a script test is one result by its exit code, 77 for "cannot run here".
# Three run at a time where there are two CPUs or more (SPW_TEST_LANES says otherwise): many wait for disks, sleeps or one another. Where all
# takes several times as long, two.
# Lanes take the next test of the list; what is printed keeps the list's order.
build=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 1
SPW_BUILD=$root/$build
export SPW_BUILD CMOCKA_MESSAGE_OUTPUT=TAP
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 TSAN_OPTIONS=halt_on_error=1
python=$(command -v python3)
case $build in *tsan) lanes=2 ;; *) lanes=3 ;; esac
[ "$(nproc 2>/dev/null || echo 1)" -gt 1 ] || lanes=1
lanes=${SPW_TEST_LANES:-$lanes}
out=$(mktemp -d)
pids=
trap 'kill $pids 2>/dev/null; rm -rf "$out"' EXIT
trap 'exit 130' INT TERM
pass=0 fail=0 skip=0 count=0
want() { [ $# -eq 1 ] && return 0; t=$1; shift; for n in "$@"; do [ "$n" = "$t" ] && return 0; done; return 1; }
lane() {
    child=
    trap 'kill $child 2>/dev/null; exit 1' TERM
    k=0
    while read -r name path; do
        k=$((k + 1))
        mkdir "$out/$k.taken" 2>/dev/null || continue
        t0=$(date +%s)
        case $path in *.sh) set -- bash "$path" ;; *) set -- "$path" ;; esac
        [ -n "$python" ] || ! grep -qI python3 "$path" || set -- sh -c 'echo "no python3"; exit 77'
        timeout 2700 "$@" >"$out/$k.log" 2>&1 </dev/null &
        child=$!
        wait $child
        echo "$? $(($(date +%s) - t0))" >"$out/$k.rc" && mv "$out/$k.rc" "$out/$k.done"
    done <"$out/list"
}
# A few lines of what failed: the check, where, and what it said; of a crash, what it said last.
brief() { # name rc log
    echo "$1 (exit $2$([ "$2" -eq 124 ] && echo ", out of time"))"
    if grep '^not ok ' "$3" | grep -qvi '# skip'; then
        awk 'tolower($0) ~ /^not ok .*# skip/ { left = 0; next }
             /^not ok / { if (last ~ /^# exit /) print last; print; left = 4; next }
             /^#/ && left > 0 { print; left-- }
             !/^#/ { left = 0 }
             { last = $0 }' "$3" | head -n 12
    else
        grep -m 2 -E 'ERROR: |runtime error: |Assert|assert' "$3"
        tail -n 3 "$3"
    fi | cut -c 1-160
}
tally() { # name rc log seconds
    p=$(grep -c '^ok ' "$3") s=$(grep -ci '^ok .*# skip' "$3") f=$(grep '^not ok ' "$3" | grep -vci '# skip') t=$(grep -ci '^not ok .*# skip' "$3")
    p=$((p - s)) s=$((s + t)) # cmocka says "not ok" of what it skipped
    [ $((p + f + s)) -gt 0 ] || [ "$2" -ne 77 ] || s=1
    if [ $((p + f + s)) -eq 0 ] || { [ "$2" -ne 0 ] && [ "$2" -ne 77 ] && [ "$f" -eq 0 ]; }; then f=$((f + 1)); fi
    pass=$((pass + p)) fail=$((fail + f)) skip=$((skip + s))
    echo "$1: $p passed, $f failed, $s skipped ($4 s)"
    [ "$f" -gt 0 ] || return 0
    echo "--- $1 (exit $2)" && grep -v '^ok ' "$3" | tail -n 60 && echo "---"
    brief "$1" "$2" "$3" >>"$out/failed"
}
# Those that take minutes begin, so that none of them ends alone.
long="cuda_emulated emulated_training emulated_ranks random_worlds plan ranks gpu_ops generate preference_training traffic"
list() { for name in $long; do ls "$build/tests/test_$name" "tests/test_$name.sh"; done 2>/dev/null; ls "$build"/tests/test_* tests/test_*.sh; }
for path in $(list | awk '!seen[$0]++'); do
    name=$(basename "$path" .sh)
    case $path in
    *.o | *.d) continue ;;
    *.sh) [ -f "$path" ] || continue ;;
    *) [ -x "$path" ] && [ -f "$path" ] && [ -f "tests/$name.c" ] || continue ;;
    esac
    [ $# -gt 0 ] && { want "$name" "$@" || continue; }
    case " $SPW_TEST_WITHOUT " in *" ${path##*/} "*) continue ;; esac
    echo "$name $path" >>"$out/list"
    count=$((count + 1))
done
[ "$count" -gt 0 ] || { echo "no such test in $build"; exit 1; }
for _ in $(seq "$lanes"); do
    lane &
    pids="$pids $!"
done
k=0
while read -r name path; do
    k=$((k + 1))
    until [ -f "$out/$k.done" ]; do sleep 0.1; done
    read -r rc seconds <"$out/$k.done"
    tally "$name" "$rc" "$out/$k.log" "$seconds"
done <"$out/list"
[ -f "$out/failed" ] && echo "failed:" && head -c 1000 "$out/failed" | awk 1 # again, where whoever sees only the end sees it
echo "$pass passed, $fail failed, $skip skipped"
[ "$fail" -eq 0 ]
