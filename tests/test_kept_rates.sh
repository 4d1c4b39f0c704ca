#!/bin/bash
# What is chosen by time is so by rates that were measured here, where there are any: on the emulated cuda device, with rates that are then
# written into the file. State on the device takes the place of gathered weights where a disk is slow, and not where the link is. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
[ -f "$build/emulated/spillway-cuda.so" ] || { echo "1..1"; echo "ok 1 - kept rates # SKIP no C++ compiler when this was built"; exit 77; }
case $build in *asan | *tsan) echo "1..1"; echo "ok 1 - kept rates # SKIP measures; test_choices runs the same choices there"; exit 77 ;; esac
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-rates-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
export SPW_CUDA_PLUGIN SPW_EMULATE_GUARD=1 OPENBLAS_NUM_THREADS=1
SPW_CUDA_PLUGIN=$(realpath "$build/emulated/spillway-cuda.so")
mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 2000; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
cat >"$dir/c.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 40, "n_embd": 48, "n_layer": 12, "n_head": 3},
  "data": {"path": ["$dir/text.txt"], "seq_length": 40, "seed": 1},
  "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
  "offload_optimizer": {"device": "nvme", "nvme_path": "$dir/swap"}},
  "spillway": {"steps": 3, "seed": 3, "device": "cuda", "device_memory": "1600KiB", "chunk_elems": 4096, "chaos_seed": 5} }
JSON
cache=$dir/cache/spillway/rates.json
set_rates() { # WHAT VALUE...: of all that is kept of it; the last value is that of the rest
    awk -v what="|$1|" -v list="${*:2}" 'BEGIN { n = split(list, v, " ") } index($0, what) { k = 1 }
        k && /^ +[0-9.e+]+,?$/ { sub(/[0-9.e+]+/, v[k]); k = k < n ? k + 1 : n } /\]/ { k = 0 } { print }' "$cache" >"$cache.new" && mv "$cache.new" "$cache"
}
plan() { "$spw" plan "$dir/c.json" "$@" >"$dir/out" 2>"$dir/err"; }
planned() { plan --no-measure && sed -n "s/^  \($1\)  *//p" "$dir/out" | head -n 1 | tr -s ' '; }
train() { "$spw" train "$dir/c.json" --set spillway.run_log="$dir/$1.log" >"$dir/$1.out" 2>"$dir/err"; }
losses() { sed -n 's/.*"step":[0-9]*,"loss":\([^,]*\),"grad_norm":\([^,]*\).*/\1 \2/p' "$dir/$1.log"; }
moved() { sed -n 's/.*"step":[0-9].*"bytes":{.*"'"$2"'":\([0-9]*\).*/\1/p' "$dir/$1.log" | awk '{ n++; s += $1 } END { print n == 3 ? s : "steps are missing" }'; }
reads() { run plan --no-measure "$dir/c.json" && grep -q "$1" "$dir/out"; }

# Before anything was measured all weights stay gathered, because an estimated link costs nothing that is known.
all=$(planned "gathered units")
check "by estimate, weights stay gathered" reads "all units fit and stay gathered"
check "trains so" train estimated
check "a plan measures" plan
check "and chooses by what it measured" sh -c "! grep -q 'by estimate' '$dir/out' && [ -s '$cache' ]"
# Computing takes no time, a disk 10 MB/s.
set_rates compute 1e12
set_rates path 1e7
set_rates copies 1e11
fewer=$(planned "gathered units")
echo "# gathered: $all by estimate, $fewer with a slow disk"
check "a slow disk: state takes the place of weights" reads "measured here, though weights then come more often"
check "a slow disk: less is gathered" [ "$fewer" != "$all" ]
check "a slow disk: trains" train disk
check "a slow disk: gathers what was planned" sh -c "sed -n 's/^  gathered units  *//p' '$dir/disk.out' | tr -s ' ' | grep -Fqx '$fewer'"
check "a slow disk: the same losses" cmp <(losses estimated) <(losses disk)
echo "# disk $(moved estimated nvme_read) and $(moved disk nvme_read), link $(moved estimated h2d) and $(moved disk h2d)"
check "a slow disk: fewer bytes of it" [ "$(moved disk nvme_read)" -lt $(($(moved estimated nvme_read) * 95 / 100)) ]
check "a slow disk: more over the link" [ "$(moved disk h2d)" -gt "$(moved estimated h2d)" ]
# A link in of 100 KB/s is what a step waits for.
set_rates copies 1e5 1e11
check "a slow link: weights stay gathered" reads "all units fit and stay gathered"
check "a slow link: trains" train link
check "a slow link: the same losses" cmp <(losses estimated) <(losses link)
check "a slow link: fewer bytes over it than with a slow disk" [ "$(moved link h2d)" -lt $(($(moved disk h2d) * 9 / 10)) ]
echo "1..$n"
