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
pcre="$(pkg-config --cflags --libs libpcre2-8 libutf8proc)"
clang $flags $inc -Iruntime/data tests/fuzz_tokens.c runtime/data/*.c runtime/files/*.c runtime/base/*.c $libs $pcre -o build/fuzz/tokens
clang $flags $inc -Iruntime/data tests/fuzz_tokenizer.c runtime/data/tokenizer*.c runtime/files/*.c runtime/base/*.c $libs $pcre -o build/fuzz/tokenizer
mkdir -p build/fuzz/tokenizer-corpus # first byte: 0 members of tokenizer.json, 1 a pattern and text, 2 and 3 text
printf '0{"normalizer":{"type":"NFC"},"model":{"ignore_merges":true},"added_tokens":[{"id":400,"content":"<a>"}],"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]}}' >build/fuzz/tokenizer-corpus/members
printf "%s\0%s" '1(?i:x|ll)|[^\r\n\p{L}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|[a-z\s]+' 'It is 123 waters  ' >build/fuzz/tokenizer-corpus/pattern
{ printf 2; head -c 3000 tests/vectors/tok_text.txt; } >build/fuzz/tokenizer-corpus/text
{ printf 3; tail -c 3000 tests/vectors/tok_text.txt; } >build/fuzz/tokenizer-corpus/special
for t in safetensors config aio tokens tokenizer; do
    echo "fuzzing $t for ${FUZZ_SECONDS:-30} s"
    mkdir -p build/fuzz/$t-corpus
    build/fuzz/$t -max_total_time="${FUZZ_SECONDS:-30}" -timeout=10 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
        build/fuzz/$t-corpus build/fuzz/corpus
done
rm -f "${TMPDIR:-/tmp}"/spw-fuzz-aio-* "${TMPDIR:-/tmp}"/spw-fuzz-tokenizer-*
