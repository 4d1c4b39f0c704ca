#!/bin/bash
# spillway bench copy: its rows, its JSON, wrong usage, and that a copy which loses a byte fails it. Nothing is timed. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-bench-copy-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
json() { python3 - "$dir/out" "$@"; }

# The table: a header that names build and device, a row per operation and size, nothing wrong.
check "smoke" run bench copy --smoke
check "the header" grep -q "^# bench copy  schema 1  spillway [0-9.]*  device cpu .*build" "$dir/out"
variant=$(basename "$build")
case $variant in
release | debug | checked | asan | tsan) check "the header names the build" grep -q "build $variant\$" "$dir/out" ;;
esac
check "14 operations at 2 sizes" test "$(grep -vc '^#' "$dir/out")" -eq 28
check "#wrong is 0 in all rows" test -z "$(grep -v '^#' "$dir/out" | awk '$8 != 0')"
check "2 repetitions in all rows" test -z "$(grep -v '^#' "$dir/out" | awk '$4 - 0 != $4 || $3 != 2')"

# JSON: one object per row, every field, numbers that agree with each other and with the raw samples.
fields() {
    json <<'PY'
import json, statistics, sys
head, *rows = [json.loads(line) for line in open(sys.argv[1])]
assert head["header"]["bench"] == "copy" and head["header"]["schema"] == 1
assert len(rows) == 14 * 3 and {r["size"] for r in rows} == {4, 100004, 1048576}
for r in rows:
    assert set(r) == {"op", "size", "reps", "gb_s", "p50_us", "p99_us", "cpu_s_per_gb", "ceiling_gb_s",
                      "ratio_to_ceiling", "wrong", "samples_us"}, r
    legs = 2 if r["op"].startswith("both") else 1
    near = lambda a, b: abs(a - b) <= 1e-4 * abs(b)
    assert r["wrong"] == 0 and r["reps"] == len(r["samples_us"]) == 2, r
    assert near(r["p50_us"], statistics.median(r["samples_us"])) and near(r["p99_us"], max(r["samples_us"])), r
    assert near(r["gb_s"], legs * r["size"] / r["p50_us"] * 1e-3), r
    assert near(r["ratio_to_ceiling"], r["gb_s"] / r["ceiling_gb_s"]) and r["cpu_s_per_gb"] > 0, r
PY
}
check "smoke with sizes of one's own, as JSON" run bench copy --smoke --json --size 4,100004,1MiB
check "its rows" fields
cp "$dir/out" "$dir/copy.json"
check "plot draws them" run plot "$dir/copy.json" -o "$dir/copy.svg"

# A timed run stops by the clock, not before 5 repetitions.
check "a short run" run bench copy --seconds 0.000001 --size 1KiB --device cpu
check "makes 5 repetitions" test -z "$(grep -v '^#' "$dir/out" | awk '$3 < 5')"

# A memcpy that loses the last byte of large copies: #wrong shows it, and the exit code is 1.
case $build in
*asan* | *tsan*) n=$((n + 1)); echo "ok $n - a broken copy # SKIP sanitizers replace memcpy" ;;
*)
    if lossy_copies 4096; then
        LD_PRELOAD=$dir/lossy.so "$spw" bench copy --smoke --json --size 64KiB >"$dir/out" 2>"$dir/err"
        code=$?
        check "a broken copy fails" test $code -eq 1 -a -n "$(grep 'arrived wrong' "$dir/err")"
        # The copy to the host is compared where it lies: one element in each of 3 copies, the warm-up included.
        check "and is counted" grep -q '"op":"d2h-bf16-pinned".*"wrong":3,' "$dir/out"
    else
        n=$((n + 1)); echo "ok $n - a broken copy # SKIP no compiler"
    fi
    ;;
esac

# A full output is an error.
if [ -w /dev/full ]; then
    "$spw" bench copy --smoke --size 4 >/dev/full 2>"$dir/err"
    check "a full output fails" test $? -eq 1
fi

# Wrong usage.
expect 2 "which one" "bench alone" bench
expect 2 "no benchmark frob" "an unknown benchmark" bench frob
expect 2 "unknown option --wat" "an unknown option" bench copy --wat
expect 2 "needs a value" "--size without a value" bench copy --size
expect 2 "\"4KiB \"" "a size that is none" bench copy --size "64KiB,4KiB ,x"
expect 2 "\"\"" "an empty size" bench copy --size 4KiB,
expect 2 "multiple of 4" "half an element" bench copy --size 4KiB,6
expect 2 "multiple of 4" "size 0" bench copy --size 0
expect 2 "not a size" "a negative size" bench copy --size -4
expect 2 "more than 16" "too many sizes" bench copy --size 4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4
expect 1 "of memory" "more than the memory" bench copy --size 1TiB
expect 2 "--seconds 0 " "no time" bench copy --seconds 0
expect 2 "--seconds nan " "no number" bench copy --seconds nan
expect 2 "device nowhere is unknown: auto, cpu or cuda[:i]" "an unknown device" bench copy --smoke --device nowhere
expect 1 "cuda" "a device that is not there" bench copy --smoke --device cuda:7
check "help" run help bench
echo "1..$n"
