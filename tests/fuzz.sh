#!/bin/sh
# Builds the parsers' fuzzers with clang and runs each for FUZZ_SECONDS (default 30).
set -eu
cd "$(dirname "$0")/.."
command -v clang >/dev/null || { echo "make fuzz needs clang: apt install clang libclang-rt-14-dev"; exit 1; }
inc="-Iruntime/base -Iaio -Icpu_adam -Igpu -Ioffload -Iruntime -Iruntime/nn -Iruntime/files"
flags="-std=c11 -D_GNU_SOURCE -g -O1 -fsanitize=fuzzer,address,undefined"
mkdir -p build/fuzz/corpus
cp examples/demo.json build/fuzz/corpus/
clang $flags $inc tests/fuzz_safetensors.c runtime/files/*.c runtime/base/*.c -ljansson -lm -pthread -o build/fuzz/safetensors
clang $flags $inc tests/fuzz_config.c runtime/config.c runtime/config_include.c runtime/config_keys.c runtime/files/*.c runtime/base/*.c cpu_adam/state.c \
    aio/*.c -ljansson -lm -pthread -o build/fuzz/config
for t in safetensors config; do
    echo "fuzzing $t for ${FUZZ_SECONDS:-30} s"
    mkdir -p build/fuzz/$t-corpus
    build/fuzz/$t -max_total_time="${FUZZ_SECONDS:-30}" -timeout=10 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
        build/fuzz/$t-corpus build/fuzz/corpus
done
