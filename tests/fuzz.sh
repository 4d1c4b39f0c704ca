#!/bin/sh
# Builds the fuzzers with clang and runs each for FUZZ_SECONDS (default 30).
set -eu
cd "$(dirname "$0")/.."
command -v clang >/dev/null || { echo "make fuzz needs clang: apt install clang libclang-rt-14-dev"; exit 1; }
inc="-Iruntime/base -Iaio -Icpu_adam -Igpu -Ioffload -Iruntime -Iruntime/nn -Iruntime/files"
flags="-std=c11 -D_GNU_SOURCE -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all"
[ -w /dev/shm ] && export TMPDIR=/dev/shm # flushes cost nothing there
libs="-ljansson $(pkg-config --libs libxxhash 2>/dev/null || true) $(pkg-config --libs numa 2>/dev/null || true) -lm -pthread"
mkdir -p build/fuzz/corpus
cp examples/demo.json build/fuzz/corpus/
clang $flags $inc tests/fuzz_safetensors.c runtime/files/*.c runtime/base/*.c $libs -o build/fuzz/safetensors
clang $flags $inc tests/fuzz_config.c runtime/config.c runtime/config_include.c runtime/config_keys.c runtime/files/*.c runtime/base/*.c cpu_adam/*.c \
    aio/*.c offload/swap.c $libs -o build/fuzz/config
uring=
pkg-config --exists liburing 2>/dev/null && uring="-DSPW_HAVE_URING=1 -luring"
clang $flags $inc tests/fuzz_aio.c aio/*.c runtime/base/*.c $libs $uring -o build/fuzz/aio
clang $flags $inc -Iruntime/data tests/fuzz_tokens.c runtime/data/*.c runtime/base/*.c $libs -o build/fuzz/tokens
for t in safetensors config aio tokens; do
    echo "fuzzing $t for ${FUZZ_SECONDS:-30} s"
    mkdir -p build/fuzz/$t-corpus
    build/fuzz/$t -max_total_time="${FUZZ_SECONDS:-30}" -timeout=10 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
        build/fuzz/$t-corpus build/fuzz/corpus
done
rm -f "${TMPDIR:-/tmp}"/spw-fuzz-aio-*
