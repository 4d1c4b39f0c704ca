#!/bin/sh
# Builds the library and the fuzzers with clang and runs each for FUZZ_SECONDS (default 30).
set -eu
cd "$(dirname "$0")/.."
command -v clang >/dev/null || { echo "make fuzz needs clang: apt install clang libclang-rt-14-dev"; exit 1; }
[ -w /dev/shm ] && export TMPDIR=/dev/shm # flushes cost nothing there
lib=build/fuzz/lib/libspillway.a
make -s -j"$(nproc)" CC=clang VARIANT=asan BUILD=build/fuzz/lib EXTRA_CFLAGS=-fsanitize=fuzzer-no-link $lib
inc="-Iruntime/base -Iaio -Icpu_adam -Igpu -Ioffload -Iruntime -Iruntime/nn -Iruntime/data -Iruntime/files"
flags="-std=c11 -D_GNU_SOURCE -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all"
libs="$(pkg-config --libs openblas numa jansson libxxhash libpcre2-8 libutf8proc) -lm -pthread"
pkg-config --exists liburing 2>/dev/null && libs="$libs -luring"
mkdir -p build/fuzz/corpus
cp examples/demo.json build/fuzz/corpus/
for c in llama3 qwen3_bias gpt2; do cp tests/vectors/families/$c/config.json build/fuzz/corpus/$c.json; done
echo '{"weight_map":{"a":"s","b":"s"}}' >build/fuzz/corpus/index.json
mkdir -p build/fuzz/tokenizer-corpus # first byte: 0 members of tokenizer.json, 1 a pattern and text, 2 and 3 text
printf '0{"normalizer":{"type":"NFC"},"model":{"ignore_merges":true},"added_tokens":[{"id":400,"content":"<a>"}],"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]}}' >build/fuzz/tokenizer-corpus/members
printf "%s\0%s" '1(?i:x|ll)|[^\r\n\p{L}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|[a-z\s]+' 'It is 123 waters  ' >build/fuzz/tokenizer-corpus/pattern
{ printf 2; head -c 3000 tests/vectors/tok_text.txt; } >build/fuzz/tokenizer-corpus/text
{ printf 3; tail -c 3000 tests/vectors/tok_text.txt; } >build/fuzz/tokenizer-corpus/special
for t in ${*:-safetensors config hf aio tokens tokenizer}; do
    clang $flags $inc tests/fuzz_$t.c $lib $libs -o build/fuzz/$t
    echo "fuzzing $t for ${FUZZ_SECONDS:-30} s"
    mkdir -p build/fuzz/$t-corpus
    build/fuzz/$t -max_total_time="${FUZZ_SECONDS:-30}" -timeout=10 -rss_limit_mb=2048 -verbosity=0 -print_final_stats=1 \
        build/fuzz/$t-corpus build/fuzz/corpus
done
rm -rf "${TMPDIR:-/tmp}"/spw-fuzz-aio-* "${TMPDIR:-/tmp}"/spw-fuzz-hf-* "${TMPDIR:-/tmp}"/spw-fuzz-tokenizer-*
