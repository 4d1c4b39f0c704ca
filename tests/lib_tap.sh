# Sourced by tests in shell: what they report in TAP, and how they run the program $spw. What it says is in $dir/out and $dir/err.
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
