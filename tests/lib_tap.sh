# Sourced by tests in shell: what they report in TAP, and how they run the program $spw. What it says is in $dir/out and $dir/err.
# Tokens and rates are kept below it too: nobody's own cache is read or filled.
export XDG_CACHE_HOME=$dir/cache
n=0
ok() { n=$((n + 1)); echo "ok $n - $1"; }
bad() { n=$((n + 1)); echo "not ok $n - $1"; sed 's/^/# /' "$dir/err" "$dir/out" 2>/dev/null | tail -n 40; }
skip() { n=$((n + 1)); echo "ok $n - $1 # SKIP $2"; }
# check NAME COMMAND...: the command succeeds.
check() { local checked=$1; shift; if "$@"; then ok "$checked"; else bad "$checked"; fi; }
run() { "$spw" "$@" >"$dir/out" 2>"$dir/err"; }
# expect CODE TEXT NAME ARGS...: the exit code of $expects with ARGS, and TEXT where said looks for it.
expects=run
said() { grep -qF -- "$1" "$dir/err"; }
expect() {
    local code=$1 text=$2 expected=$3 got
    shift 3
    $expects "$@"
    got=$?
    if [ $got -eq "$code" ] && said "$text"; then ok "$expected"; else
        echo "# exit $got, wanted $code; message should hold: $text"
        bad "$expected"
    fi
}
# comes COMMAND...: it is true within two minutes, which is long for any machine.
comes() {
    local until=$((SECONDS + 120))
    until "$@"; do [ $SECONDS -lt $until ] && sleep 0.05 || return 1; done
}
# pids TEXT [RANK]: processes of the program that have TEXT in an argument, and are that rank, the oldest first.
pids() {
    local at
    for at in /proc/[0-9]*; do
        [ "$(cat "$at/comm" 2>/dev/null)" = spillway ] && grep -qF -- "$1" "$at/cmdline" 2>/dev/null || continue
        [ $# -lt 2 ] || grep -qzx "RANK=$2" "$at/environ" 2>/dev/null || continue
        echo "${at#/proc/}"
    done | sort -n
}
# lossy_copies BYTES: makes $dir/lossy.so, to be preloaded: a memcpy that loses the last byte of copies as large as that. False: no compiler.
lossy_copies() {
    cat >"$dir/lossy.c" <<'C'
#include <stddef.h>
void *memcpy(void *restrict d, const void *restrict s, size_t n)
{
    volatile char *to = d;
    const char *from = s;
    for (size_t i = 0; i + (n >= LARGE) < n; i++)
        to[i] = from[i];
    return d;
}
C
    ${CC:-gcc} -O1 -fno-builtin -DLARGE="$1" -shared -fPIC -o "$dir/lossy.so" "$dir/lossy.c" 2>"$dir/err"
}
