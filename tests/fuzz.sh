#!/bin/sh
# Builds the library and the fuzzers with clang and runs each for FUZZ_SECONDS (default 30), from tests/corpus on.
set -eu
cd "$(dirname "$0")/.."
command -v clang >/dev/null || { echo "make fuzz needs clang: apt install clang libclang-rt-14-dev"; exit 1; }
[ -w /dev/shm ] && export TMPDIR=/dev/shm # flushes cost nothing there
lib=build/fuzz/lib/libspillway.a
make -s -j"$(nproc)" CC=clang VARIANT=asan BUILD=build/fuzz/lib EXTRA_CFLAGS=-fsanitize=fuzzer-no-link $lib
inc="-Iruntime/base -Iaio -Icpu_adam -Igpu -Ioffload -Iruntime -Iruntime/nn -Iruntime/comm -Iruntime/data -Iruntime/files"
flags="-std=c11 -D_GNU_SOURCE -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all"
libs="$(pkg-config --libs openblas numa jansson libxxhash libisal libpcre2-8 libutf8proc) -lm -pthread"
pkg-config --exists liburing 2>/dev/null && libs="$libs -luring"
mkdir -p build/fuzz/corpus
cp examples/demo.json build/fuzz/corpus/
for c in llama3 qwen3_bias gpt2 gemma3 gemma3_new gemma2_full phi3_long qwen2_5_vl_images qwen3_5_moe_images qwen3_next; do cp tests/vectors/families/$c/config.json build/fuzz/corpus/$c.json; done
cp tests/vectors/scaled/llama/config.json build/fuzz/corpus/fp8.json
cp tests/vectors/scaled/kimi_k25/config.json build/fuzz/corpus/kimi.json
mkdir -p build/fuzz/tokenizer-corpus # first byte: 0 members of tokenizer.json, 1 a pattern and text, 2 and 3 text; from 0xa0 on lines of tiktoken.model, from 0xc0 on characters
{ printf 2; head -c 3000 tests/vectors/tok_text.txt; } >build/fuzz/tokenizer-corpus/text
{ printf 3; tail -c 3000 tests/vectors/tok_text.txt; } >build/fuzz/tokenizer-corpus/special
{ printf '\240'; sed -n '257,400p' tests/vectors/tok_kimi/tiktoken.model; } >build/fuzz/tokenizer-corpus/ranks
{ printf '\377'; head -c 3000 tests/vectors/tok_text.txt; } >build/fuzz/tokenizer-corpus/characters
for t in ${*:-safetensors config hf aio tokens tokenizer manifest torch}; do
    clang $flags $inc tests/fuzz_$t.c $lib $libs -o build/fuzz/$t
    echo "fuzzing $t for ${FUZZ_SECONDS:-30} s"
    mkdir -p build/fuzz/$t-corpus
    build/fuzz/$t -max_total_time="${FUZZ_SECONDS:-30}" -timeout=100 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 -artifact_prefix=build/fuzz/ \
        build/fuzz/$t-corpus build/fuzz/corpus tests/corpus/$t
done
rm -rf "${TMPDIR:-/tmp}"/spw-fuzz-aio-* "${TMPDIR:-/tmp}"/spw-fuzz-torch-* "${TMPDIR:-/tmp}"/spw-fuzz-hf-* "${TMPDIR:-/tmp}"/spw-fuzz-tokenizer-* "${TMPDIR:-/tmp}"/spw-fuzz-ranks-*
