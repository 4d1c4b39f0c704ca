#!/bin/bash
# The optimizers on another architecture: cross-built for aarch64 (NEON), run in an emulator, the same bits as here.
# So does a CPU that lacks a part of AVX2. Needs gcc-aarch64-linux-gnu and qemu-user-static; without them it says so.
cd "$(dirname "$0")/.." || exit 1
build=${SPW_BUILD:-build/checked}
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-arch-XXXXXX")
trap 'rm -rf "$dir"' EXIT
n=0
ok() { n=$((n + 1)); if [ "$1" -eq 0 ]; then echo "ok $n - $2"; else echo "not ok $n - $2"; head -n 12 "$dir/log" | sed 's/^/# /'; fi; }
inc="-D_GNU_SOURCE -Iruntime/base -Icpu_adam"
case $build in
*asan* | *tsan*) echo "ok 1 - digests # skip one build of the reference is enough"; echo "1..1"; exit 0 ;;
esac
# shellcheck disable=SC2046,SC2086
cc $inc -O2 tests/digest_optimizers.c "$build/libspillway.a" $(pkg-config --libs openblas numa jansson libxxhash) $(pkg-config --libs liburing 2>/dev/null) -lm -pthread -o "$dir/here" >"$dir/log" 2>&1
ok $? "the digests build"
"$dir/here" >"$dir/best" 2>"$dir/log"
ok $? "the best instruction set here"
"$dir/here" scalar >"$dir/scalar" 2>"$dir/log" && diff "$dir/best" "$dir/scalar" >"$dir/log"
ok $? "scalar gives the same bits"
[ "$(wc -l <"$dir/best")" -eq 84 ]
ok $? "84 combinations of optimizer, format and gradient"
if command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64-static >/dev/null; then
    # libnuma is not here for that machine, and nothing of it is called.
    echo 'long get_mempolicy(void); long get_mempolicy(void) { return -1; } long mbind(void); long mbind(void) { return -1; }' >"$dir/numa.c"
    # shellcheck disable=SC2086
    aarch64-linux-gnu-gcc -static $inc -std=c11 -O3 -ffp-contract=off -fno-math-errno -Wall -Wextra ${WERROR:+-Werror} -Wno-format-truncation tests/digest_optimizers.c \
        cpu_adam/*.c runtime/base/*.c "$dir/numa.c" -lm -pthread -o "$dir/there" >"$dir/log" 2>&1
    ok $? "cpu_adam builds for aarch64"
    qemu-aarch64-static "$dir/there" >"$dir/aarch64" 2>"$dir/log" && diff "$dir/best" "$dir/aarch64" >"$dir/log"
    ok $? "aarch64 gives the same bits"
else
    n=$((n + 1)); echo "ok $n - aarch64 # skip gcc-aarch64-linux-gnu or qemu-user-static is not installed"
fi
# Virtual machines may hide a part of an instruction set: what is left runs, with the same bits.
if [ "$(uname -m)" = x86_64 ] && command -v qemu-x86_64-static >/dev/null; then
    qemu-x86_64-static -cpu Haswell,-f16c "$dir/here" >"$dir/part" 2>"$dir/log" && diff "$dir/best" "$dir/part" >"$dir/log"
    ok $? "AVX2 without F16C gives the same bits"
else
    n=$((n + 1)); echo "ok $n - AVX2 without F16C # skip qemu-user-static is not installed, or this is no x86-64"
fi
echo "1..$n"
