#!/bin/bash
# Muon from the command line: on the cpu device and on the emulated cuda device, where what is made orthogonal crosses the link. Placements,
# delays and late streams change no bit; stopping and going on neither; what is not done with it is refused in words. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
plugin=$build/emulated/spillway-cuda.so
[ -f "$plugin" ] || { echo "1..1"; echo "ok 1 - Muon # SKIP no C++ compiler when this was built"; exit 77; }
case $build in *asan | *tsan) echo "1..1"; echo "ok 1 - Muon # SKIP test_muon.c runs there"; exit 77 ;; esac
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-muon-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
plugin=$(realpath "$plugin")
export SPW_EMULATE_GUARD=1 OPENBLAS_NUM_THREADS=1
mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 2000; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
cat >"$dir/c.json" <<JSON
{ "model": {"model_type": "llama", "vocab_size": 256, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 6,
            "num_key_value_heads": 2, "max_position_embeddings": 40, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
  "data": {"path": ["$dir/text.txt"], "seq_length": 40, "seed": 1},
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "Muon", "params": {"lr": 2e-3, "weight_decay": 0.1}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": 4, "seed": 3, "device": "cpu", "chunk_elems": 8192, "eval_interval": 2, "eval_batches": 2} }
JSON
losses() { sed -n 'h; s/.*"eval_loss":\([^,}]*\).*/\1/p; g; s/.*"step":[0-9]*,"loss":\([^,]*\),"grad_norm":\([^,]*\).*/\1 \2/p' "$dir/$1"; }
same() { losses "$1" >"$dir/one"; losses "$2" >"$dir/two"; [ -s "$dir/one" ] && cmp -s "$dir/one" "$dir/two"; }
near() {
    paste <(losses "$1" | tr ' ' '\n') <(losses "$2" | tr ' ' '\n') |
        awk -v within="$3" '{ d = $1 - $2; rows++; if (!(d < within && d > -within)) { print "# number " rows ": " $1 " and " $2; bad = 1 } }
             END { exit bad || rows != 10 }'
}
# on PRECISION STREAMS LOG OVERRIDES...
on() {
    SPW_CUDA_PLUGIN=$plugin SPW_CUDA_COMPUTE=$1 SPW_EMULATE_STREAMS=$2 "$spw" train "$dir/c.json" --quiet --set spillway.device=cuda --set spillway.run_log="$dir/$3" "${@:4}" >"$dir/out" 2>&1
}
trains() { "$spw" train "$dir/c.json" --quiet --set spillway.run_log="$dir/$1" "${@:2}" >"$dir/out" 2>&1; }
refused() { "$spw" plan "$dir/c.json" --no-measure "${@:2}" >"$dir/out" 2>&1; [ $? -eq 2 ] && grep -Fq -- "$1" "$dir/out"; }
falls() { losses "$1" | awk 'NF == 2 { if (!n++) first = $1; last = $1 } END { exit !(n == 4 && last < first) }'; }
moved() { sed -n 's/.*"step":4,.*"bytes":{.*"'"$2"'":\([0-9]*\).*/\1/p' "$dir/$1"; }

there=(--set zero_optimization.offload_param.device=none --set zero_optimization.offload_optimizer.device=none)
nvme="{\"device\": \"nvme\", \"nvme_path\": \"$dir/swap\"}"
check "trains on the cpu device" trains cpu
check "the loss falls" falls cpu
check "trains with AdamW" trains adam --set 'optimizer={"type":"AdamW","params":{"lr":2e-3,"weight_decay":0.1}}'
check "which is something else" sh -c "! cmp -s '$dir/cpu' '$dir/adam'"
check "on cuda in fp32" on fp32 "" cuda
check "the losses of the cpu device" near cpu cuda 1e-4
check "in bf16" on bf16 late bf16
check "about those" near cpu bf16 0.1
for streams in "" late; do
    on fp32 "$streams" host.$streams --set spillway.fill_device=never
    check "state in host memory, ${streams:-early} streams: the same numbers" same cuda host.$streams
    on fp32 "$streams" nvme.$streams --set "zero_optimization.offload_optimizer=$nvme" --set spillway.record_slots=1 --set spillway.chunk_elems=4096
    check "records on nvme, one slot, ${streams:-early} streams: the same numbers" same cuda nvme.$streams
    on fp32 "$streams" all.$streams --set "zero_optimization.offload_optimizer=$nvme" --set "zero_optimization.offload_param=$nvme" --set spillway.chaos_seed=5
    check "all on nvme, with delays, ${streams:-early} streams: the same numbers" same cuda all.$streams
    on fp32 "$streams" there.$streams "${there[@]}" --set spillway.chaos_seed=6
    check "all on the device, with delays, ${streams:-early} streams: the same numbers" same cuda there.$streams
    on fp32 "$streams" some.$streams --set zero_optimization.offload_optimizer.ratio=0.5 --set spillway.chaos_seed=7 --set spillway.chunk_elems=4096
    check "some state on the device, ${streams:-early} streams: the same numbers" same cuda some.$streams
done
check "nothing crosses the link" [ "$(moved there.late h2d) $(moved there.late d2h)" = "0 0" ]
check "of some state less than of all of it" [ "$(moved some.late d2h)" -gt 0 -a "$(moved some.late d2h)" -lt "$(moved host.late d2h)" ]
on bf16 "" narrow --set spillway.grad_dtype=bf16 --set spillway.fill_device=never
on bf16 late narrow.there "${there[@]}" --set spillway.grad_dtype=bf16
check "gradients of 16 bits, on the device: the same numbers" same narrow narrow.there
# Only gradients of another type than is computed in need places for two matrices: the largest is 72 x 48.
working() { SPW_CUDA_PLUGIN=$plugin SPW_CUDA_COMPUTE=fp32 "$spw" plan "$dir/c.json" --no-measure --json --set spillway.device=cuda "${there[@]}" "$@" 2>/dev/null | tr -d ' \n' | sed 's/.*"working":{"device":\([0-9]*\),.*/\1/'; }
check "and places for two matrices, which others do not need there" test $(($(working --set spillway.grad_dtype=bf16) - $(working))) -eq $(((2 * 72 * 48 * 4 + 4095) / 4096 * 4096))
# Between ranks, which share memory in two halves: of 6 layers each is written again while something else is made. Matrices have more than
# 4096 elements, so that several ranks have parts of one.
deep=(-n 3 --set spillway.fill_device=never --set gradient_accumulation_steps=1 --set train_micro_batch_size_per_gpu=1 --set model.num_hidden_layers=6
      --set model.hidden_size=96 --set model.intermediate_size=144)
on fp32 "" ranks "${deep[@]}"
for streams in late odd; do
    export SPW_EMULATE_WAIT_US=400 # nor does anybody wait for a stream at once
    on fp32 $streams ranks.$streams "${deep[@]}" --set spillway.chaos_seed=8
    check "3 ranks, $streams streams: the same numbers" same ranks ranks.$streams
    on fp32 $streams ranks.there.$streams "${deep[@]}" "${there[@]}" --set spillway.chaos_seed=9
    check "3 ranks, $streams streams, all on the device: the same numbers" same ranks ranks.there.$streams
done
unset SPW_EMULATE_WAIT_US
# On devices that NCCL links nothing else crosses: as many bytes as planned.
planned() { # -n RANKS OVERRIDES...
     SPW_CUDA_PLUGIN=$plugin SPW_CUDA_COMPUTE=fp32 "$spw" plan "$dir/c.json" --no-measure --json --set spillway.device=cuda --set spillway.ranks=3 "${@:3}" >"$dir/out" 2>&1; }
between=("${deep[@]}" "${there[@]}" --set spillway.eval_interval=0)
SPW_EMULATE_DEVICES=4 SPW_NCCL=$(realpath "$build/emulated/libnccl.so.2") on fp32 "" ranks.linked "${between[@]}"
check "3 linked ranks, all on the device: the same losses" cmp <(losses ranks | grep ' ' | cut -d' ' -f1) <(losses ranks.linked | cut -d' ' -f1)
check "is planned" planned "${between[@]}"
for way in h2d d2h; do
    want=$(sed -n 's/^ *"'$way'": \([0-9][0-9]*\),*$/\1/p' "$dir/out" | head -n 1)
    echo "# $way: $(moved ranks.linked $way), planned ${want:-nothing}"
    check "and crosses as planned, $way" [ "${want:-0}" -gt 0 -a "$(moved ranks.linked $way)" = "${want:-0}" ]
done
check "as plan says" grep -q "but for those of Muon's matrices of which two ranks have a part" "$dir/out"
on fp32 late early --set gradient_clipping=1e9
on fp32 late open --set gradient_clipping=0
check "updates that begin with the gradients: the same losses" cmp <(losses early | cut -d' ' -f1) <(losses open | cut -d' ' -f1)
# In gradients' type, of 4 bytes an element here. Each matrix begins on whole 4096s, which is much of so small ones: seven a layer.
on bf16 late bytes --set spillway.device_memory=64MiB --set spillway.fill_device=never
on bf16 late bytes.adam --set spillway.device_memory=64MiB --set spillway.fill_device=never --set 'optimizer={"type":"AdamW","params":{"lr":2e-3}}'
matrices=$((4 * (48 * 48 * 2 + 16 * 48 * 2 + 3 * 72 * 48)))
echo "# out $(moved bytes d2h) and $(moved bytes.adam d2h), $matrices in matrices"
check "matrices cross the link once more each way" [ $(($(moved bytes d2h) - $(moved bytes.adam d2h) - 4 * matrices)) -lt $((4 * 8 * 4096 * 4)) ]
check "and no less" [ "$(moved bytes d2h)" -ge $(($(moved bytes.adam d2h) + 4 * matrices)) ]
# Stopped after two steps, and gone on with elsewhere.
trains whole --set spillway.checkpoint_dir="$dir/none" --set spillway.eval_interval=0
trains first --set spillway.checkpoint_dir="$dir/saved" --set spillway.eval_interval=0 --set spillway.steps=2
"$spw" train "$dir/c.json" --quiet --resume "$dir/saved" --set spillway.run_log="$dir/rest" --set spillway.eval_interval=0 --set "zero_optimization.offload_optimizer=$nvme" >"$dir/out" 2>&1
check "goes on where it stopped" cmp <(losses whole | tail -n 2) <(losses rest)
check "the momentum has its name" sh -c "'$spw' inspect '$dir'/saved/step-2/*optimizer* | grep -q 'q_proj.weight.momentum_buffer'"
check "norms have AdamW's" sh -c "'$spw' inspect '$dir'/saved/step-2/*optimizer* | grep -q 'norm.weight.exp_avg_sq'"
check "it generates" sh -c "'$spw' generate '$dir/saved' --prompt 'line 7' --tokens 5 >'$dir/said' 2>'$dir/out' && [ -s '$dir/said' ]"
check "plan says what it does" sh -c "'$spw' plan '$dir/c.json' --no-measure | grep -q 'optimizer.type *Muon'"
check "late updates are refused" refused "delayed_update above 0: not with optimizer.type Muon" --set spillway.delayed_update=1
# A momentum of 8 bits, decoded and encoded by the host and by the device: the same numbers, and near those of 32.
for streams in "" late; do
    on fp32 "$streams" int8.host.$streams --set spillway.state_format=split24-int8 --set spillway.fill_device=never
    on fp32 "$streams" int8.there.$streams --set spillway.state_format=split24-int8 "${there[@]}"
    check "momentum of 8 bits, ${streams:-early} streams, on the device: the same numbers" same int8.host.$streams int8.there.$streams
done
check "it trains" falls int8.host.
differs() { ! same "$@"; }
check "and has numbers of its own" differs cuda int8.host.
echo "1..$n"
