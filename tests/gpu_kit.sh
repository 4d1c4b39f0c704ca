#!/bin/sh
# Packs what a GPU machine needs to test and measure the cuda device without a compiler, packages or a network: programs, the
# plugin, the libraries they are linked with, and run.sh. Not the C library, nor the compiler's libgcc_s: the loader would take this one
# for cuBLASLt and NCCL as well, which need their own machine's, and that is as new as ours or newer. usage: gpu_kit.sh BUILD_DIR KIT_DIR
set -eu
build=$1 kit=$2
rm -rf "$kit"
mkdir -p "$kit/bin" "$kit/lib"
cp "$build/spillway" "$build/tests/test_cuda" "$build/tests/test_link" "$build/tests/test_gpu_ops" "$build/tests/test_gpu_attention" "$kit/bin/"
cp "$build/spillway-cuda.so" "$kit/lib/"
cp "$(dirname "$0")/gpu_run.sh" "$kit/run.sh"
cp "$(dirname "$0")/gpu_train.sh" "$kit/train.sh"
chmod +x "$kit/run.sh" "$kit/train.sh"
cd "$(dirname "$0")/.."
case $build in /*) ;; *) build=$OLDPWD/$build ;; esac
case $kit in /*) ;; *) kit=$OLDPWD/$kit ;; esac
"$build/spillway" tokenize README.md docs/*.md runtime/*.[ch] runtime/*/*.[ch] offload/*.[ch] aio/*.[ch] tests/*.[ch] --tokenizer tests/vectors/tok_gpt2.json \
    -o "$kit/tokens.bin" >/dev/null
for f in "$kit"/bin/* "$kit/lib/spillway-cuda.so"; do ldd "$f"; done | awk '$3 ~ /^\// { print $3 }' | sort -u |
    grep -vE '/(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux[^/]*)\.so' | while read -r lib; do cp -L "$lib" "$kit/lib/"; done
strip --strip-unneeded "$kit"/bin/* "$kit"/lib/*.so*
echo "$kit: $(du -sm "$kit" | cut -f1) MiB; copy it to a machine with a GPU and run run.sh there"
