#!/bin/bash
# By hand: the whole of it cross-built for aarch64, and C tests of it in an emulator, with pages of 4 KiB and of 64 KiB as kernels of Grace have
# them. usage: tests/aarch64.sh FOLDER [TEST...]; needs Debian with gcc-aarch64-linux-gnu and qemu-user-static. Libraries are
# fetched into FOLDER, and nothing is installed. What the emulator has not got is skipped or left out: io_uring, O_DIRECT, pidfds, and mincore() of large pages (test_base).
set -eu
cd "$(dirname "$0")/.."
mkdir -p "${1:?a folder for libraries and objects}"
dir=$(cd "$1" && pwd)
shift
root=$dir/root libs=$dir/root/usr/lib/aarch64-linux-gnu
if [ ! -d "$libs/openblas-pthread" ]; then
    mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial" "$dir/root"
    : >"$dir/status"
    apt() { apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State::Lists="$dir/lists" -o Dir::State::status="$dir/status" -o Dir::Cache="$dir/cache" -o APT::Sandbox::User=root "$@"; }
    apt update
    apt -y --no-install-recommends --download-only install libopenblas-dev libnuma-dev libjansson-dev libxxhash-dev libisal-dev libpcre2-dev libutf8proc-dev libcmocka-dev liburing-dev
    for deb in "$dir"/cache/archives/*.deb; do
        case ${deb##*/} in libc6-dev* | linux-libc-dev* | *-cross*) ;; *) dpkg -x "$deb" "$root" ;; esac # the compiler has its own
    done
    ln -sf openblas-pthread/libopenblas.so.0 "$libs/libopenblas.so.0"
fi
mkdir -p "$dir/tree"
git ls-files -z | xargs -0 cp -a --parents -t "$dir/tree"
cd "$dir/tree"
inc=$root/usr/include
cc="aarch64-linux-gnu-gcc -idirafter $inc -idirafter $inc/aarch64-linux-gnu -idirafter $inc/aarch64-linux-gnu/openblas-pthread -L$libs -L$libs/openblas-pthread"
cc="$cc -Wl,-rpath-link,$libs:$root/lib/aarch64-linux-gnu"
[ $# -gt 0 ] || set -- adapters begun_anew codes config cpu_adam engine families gpu_ops optimizers normal plan quant store tape tiles
PKG_CONFIG_LIBDIR=$libs/pkgconfig:$libs/openblas-pthread/pkgconfig \
    make -j"$(nproc)" objects "${@/#/build/release/tests/test_}" CC="$cc" CUDA=0 MPI=0
failed=0
for page in 4096 65536; do
    for name in "$@"; do
        rc=0
        QEMU_LD_PREFIX=$root QEMU_PAGESIZE=$page CMOCKA_MESSAGE_OUTPUT=TAP qemu-aarch64-static "build/release/tests/test_$name" >"$dir/log" 2>&1 </dev/null || rc=$?
        echo "pages of $page bytes: test_$name: $(sed -n '/# [sS][kK][iI][pP]/d; /^ok /p' "$dir/log" | wc -l) passed, exit $rc"
        [ $rc -eq 0 ] || { failed=1; sed -n '/^not ok /,+3p' "$dir/log"; tail -n 3 "$dir/log"; }
    done
done
exit $failed
