#!/bin/bash
# What make install leaves behind, as somebody else's: the folder stands on its own wherever it is moved to, each header is C and
# C++ by itself, the examples are built with what pkg-config says, against either library, and ranks find their plugin. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
variant=${build##*/}
case ${build#"$PWD/"} in build/asan | build/tsan | */*/* | /*) echo "1..0 # SKIP a library of this folder is needed, without a sanitizer's" && exit 77 ;; esac
for tool in make pkg-config "${CC:-gcc}"; do
    command -v "$tool" >/dev/null || { echo "1..0 # SKIP no $tool" && exit 77; }
done
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-install-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
here=$PWD
# What this build was made without.
without=()
[ -f "$build/spillway-cuda.so" ] || without+=(CUDA=0)
[ -f "$build/spillway-mpi.so" ] || without+=(MPI=0)
put() { make --no-print-directory -o all install VARIANT="$variant" ${without[@]+"${without[@]}"} DESTDIR="$dir/a stage" PREFIX=/opt/spillway >"$dir/out" 2>"$dir/err"; }
check "make install" put
check "says nothing of it" test ! -s "$dir/err"
# Moved, and to a name with dots and a digit.
at=$dir/else.1
mv "$dir/a stage/opt/spillway" "$at"
spw=$at/bin/spillway
cd "$dir" || exit 1
check "the program" run --version
version=$(sed 's/^spillway //' "$dir/out")
export PKG_CONFIG_PATH=$at/lib/pkgconfig
check "pkg-config has its version" test "$(pkg-config --modversion spillway)" = "$version"

# Each header by itself; with C++ every function keeps its name, so that a call of it is linked.
alone() {
    local h
    for h in "$at"/include/spillway/*.h; do
        echo "#include <${h##*/}>" >"$dir/one.$1"
        $2 $(pkg-config --cflags spillway) -Wall -Wextra -Werror -fsyntax-only "$dir/one.$1" >"$dir/out" 2>"$dir/err" || return 1
    done
}
check "each header is C" alone c "${CC:-gcc} -std=c11"
if command -v "${CXX:-g++}" >/dev/null; then
    check "and C++" alone cc "${CXX:-g++} -std=c++17"
    unnamed() { grep -L 'extern "C"' $(grep -lE '^[a-z].*\bspw_[a-z0-9_]+\(' "$at"/include/spillway/spw_*.h); }
    unnamed >"$dir/out"
    check "whose functions have C's names" test ! -s "$dir/out"
else
    skip "and C++" "no C++ compiler"
fi

# The examples, of which one trains and saves: with the shared library, and with the other where that is alone, which needs more names.
example() { # NAME OPTIONS-OF-PKG-CONFIG...
    local name=$1
    shift
    ${CC:-gcc} -std=c11 "$here/examples/$name.c" -o "$dir/$name" $(pkg-config --cflags --libs "$@" spillway) -lm >"$dir/out" 2>"$dir/err"
}
example_runs() { LD_LIBRARY_PATH=$at/lib "$@" >"$dir/out" 2>"$dir/err"; }
for name in custom_block custom_optimizer edit_state; do
    check "$name" example $name
done
check "an example runs" example_runs ./edit_state "$dir/saved"
rm "$at/lib/libspillway.so"
check "with the static library" example edit_state --static
check "it runs too" example_runs ./edit_state "$dir/static"
check "and saves the same bytes" cmp "$dir/saved/model.safetensors" "$dir/static/model.safetensors"
check "which the program shows" run inspect "$dir/saved"

# Ranks by the program, and by MPI, whose plugin is in lib/spillway.
cat >"$dir/tiny.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2},
  "data": {"path": ["$here/README.md"], "seq_length": 16}, "train_micro_batch_size_per_gpu": 1,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "spillway": {"steps": 1, "device": "cpu"} }
JSON
check "two ranks" run train "$dir/tiny.json" -n 2
if [ -f "$at/lib/spillway/spillway-mpi.so" ] && command -v mpirun >/dev/null; then
    ranks() {
        OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 300 mpirun --oversubscribe -n 2 "$spw" train "$dir/tiny.json" >"$dir/out" 2>"$dir/err"
    }
    check "two of MPI" ranks
else
    skip "two of MPI" "no MPI"
fi
echo "1..$n"
