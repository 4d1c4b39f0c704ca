#!/bin/bash
# Several ranks on the emulated cuda device, whose memory neither the host nor other ranks can address, with streams that work only
# when somebody waits for them too. In fp32 their losses are those of one rank up to rounding; with one number of ranks every stage,
# placement and way between ranks, through the host or by (emulated) NCCL, has the same losses to the last digit. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
[ -f "$build/emulated/spillway-cuda.so" ] || { echo "1..1"; echo "ok 1 - emulated ranks # SKIP no C++ compiler when this was built"; exit 77; }
case $build in *asan | *tsan) echo "1..1"; echo "ok 1 - emulated ranks # SKIP minutes under a sanitizer; test_ranks runs the same threads there"; exit 77 ;; esac
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-emur-XXXXXX")
trap 'rm -rf "$dir"' EXIT
before=$(ls /dev/shm/spw-nccl-* 2>/dev/null)
export OPENBLAS_NUM_THREADS=1 SPW_CUDA_PLUGIN=$(realpath "$build/emulated/spillway-cuda.so") SPW_CUDA_COMPUTE=fp32
export SPW_NCCL=$(realpath "$build/emulated/libnccl.so.2")
mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 2000; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
cat >"$dir/gpt2.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 3, "n_head": 2},
  "data": {"path": ["$dir/text.txt"], "seq_length": 16, "seed": 1},
  "train_batch_size": 12, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "eps": 1e-4}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": 4, "seed": 3, "device": "cuda", "fill_device": "never", "chunk_elems": 4096, "eval_interval": 2, "eval_batches": 2} }
JSON
. tests/lib_tap.sh
# train RANKS STREAMS LOG OVERRIDES...
train() {
    rm -f "$3"; count=(); [ "$1" -gt 1 ] && count=(-n "$1")
    SPW_EMULATE_STREAMS=$2 timeout -s KILL 400 "$spw" train "$dir/gpt2.json" --quiet "${count[@]}" --set spillway.run_log="$3" "${@:4}" >"$dir/out" 2>&1
}
# Every number that training decides: losses, norms, evaluations.
losses() { sed -n 'h; s/.*"eval_loss":\([^,}]*\).*/\1/p; g; s/.*"step":[0-9]*,"loss":\([^,]*\),"grad_norm":\([^,]*\).*/\1 \2/p' "$1"; }
near() {
    paste <(losses "$1" | tr ' ' '\n') <(losses "$2" | tr ' ' '\n') |
    awk -v within="$3" '{ d = $1 - $2; rows++; if (!(d <= within * $1 && -d <= within * $1)) { print "# number " rows ": " $1 " and " $2; bad = 1 } }
         END { if (rows != 10) print "# " rows " numbers"; exit bad || rows != 10 }'
}
same() { losses "$1" >"$dir/one"; losses "$2" >"$dir/two"; [ "$(wc -w <"$dir/one")" -eq 10 ] && cmp -s "$dir/one" "$dir/two"; }
differ() { ! cmp -s <(losses "$1") <(losses "$2"); }
# placed RANKS NAME STREAMS OVERRIDES...: the numbers of the first run with so many ranks. On one device ranks go through the host.
placed() { train "$1" "$3" "$dir/log" "${@:4}"; check "$1 ranks, $wire, ${3:-early} streams, $2" same "$dir/ranks$1" "$dir/log"; }
host() { unset SPW_EMULATE_DEVICES; wire="by host"; }
nccl() { export SPW_EMULATE_DEVICES=4; wire="by nccl"; }
nvme="{\"device\": \"nvme\", \"nvme_path\": \"$dir/swap\"}"
all_nvme=(--set zero_optimization.offload_param="$nvme" --set zero_optimization.offload_optimizer="$nvme")
on_device=(--set zero_optimization.offload_param.device=none --set zero_optimization.offload_optimizer.device=none)
# Bytes between host and device in a step of rank 0.
crossed() { sed -n 's/.*"step":[0-9]*,.*"h2d":\([0-9]*\),"d2h":\([0-9]*\).*/\1 \2/p' "$1" | sort -u | tr '\n' ';'; }
train 1 "" "$dir/ranks1"
for ranks in 2 3; do
    host
    train $ranks "" "$dir/ranks$ranks"
    check "$ranks ranks have the losses of one" near "$dir/ranks1" "$dir/ranks$ranks" 1e-5
    check "and say that they share a GPU" test "$(grep -c "warning: $ranks ranks of this host share 1 GPU: " "$dir/out")" -eq 1
    train $ranks "" "$dir/log" --set spillway.device=cpu
    check "$ranks ranks have the losses of the cpu device" near "$dir/log" "$dir/ranks$ranks" 1e-4
    placed $ranks "everything on nvme, small pieces, random delays" late "${all_nvme[@]}" --set spillway.chaos_seed=$ranks
    placed $ranks "least gathered weights" late --set zero_optimization.max_live_parameters=180000
    placed $ranks "state on the device, stage $((6 - 2 * ranks))" late "${on_device[@]}" --set zero_optimization.stage=$((6 - 2 * ranks)) \
        --set spillway.chaos_seed=6
    placed $ranks "some state on the device" late --set zero_optimization.offload_optimizer.ratio=0.5 --set spillway.chaos_seed=4
    nccl
    placed $ranks "in host memory" "" --set spillway.collectives=nccl
    placed $ranks "some state on the device, stage 1" late --set zero_optimization.stage=1 --set zero_optimization.offload_param.device=none \
        --set zero_optimization.offload_optimizer.ratio=0.5 --set spillway.chaos_seed=5
    check "and nobody shares" test "$(grep -c warning: "$dir/out")" -eq 0
    placed $ranks "everything on nvme, gradients too, small pieces, random delays" late "${all_nvme[@]}" --set spillway.gradients=nvme --set spillway.chaos_seed=$ranks
    placed $ranks "least gathered weights" late --set zero_optimization.max_live_parameters=180000 --set spillway.chaos_seed=7
    export SPW_EMULATE_FREE=1:3400 # rank 1 for itself would have room for fewer gathered units than the others
    placed $ranks "one device with less free memory" late
    unset SPW_EMULATE_FREE
    placed $ranks "stage 2" late --set zero_optimization.stage=2 --set zero_optimization.offload_param.device=none
    placed $ranks "state on the device, stage 1, no prefetching" "" "${on_device[@]}" --set zero_optimization.stage=1 --set spillway.prefetch=false
    placed $ranks "state on the device, stage $((9 - 3 * ranks))" late "${on_device[@]}" --set zero_optimization.stage=$((9 - 3 * ranks)) \
        --set spillway.chaos_seed=9
    check "and nothing crosses between host and device" test "$(crossed "$dir/log")" = "0 0;"
done
# Muon: each rank has parts of matrices, which all of them bring together; cut among groups too.
muon=(--set 'optimizer={"type":"Muon","params":{"lr":2e-3,"eps":1e-4}}')
host
train 1 "" "$dir/ranks1.muon" "${muon[@]}"
train 3 "" "$dir/ranks3" "${muon[@]}"
check "3 ranks with Muon have the losses of one" near "$dir/ranks1.muon" "$dir/ranks3" 1e-4
placed 3 "Muon, everything on nvme, random delays" late "${muon[@]}" "${all_nvme[@]}" --set spillway.chaos_seed=3
nccl
placed 3 "Muon, one record slot" late "${muon[@]}" "${all_nvme[@]}" --set spillway.record_slots=1
train 4 "" "$dir/ranks4" "${muon[@]}" --set zero_optimization.mics_shard_size=2
check "two groups of two with Muon have the losses of one" near "$dir/ranks1.muon" "$dir/ranks4" 1e-4
# Sequences whose positions ranks share: 2 heads, and 4 of two groups.
shared=(--set sequence_parallel_size=2)
for ranks in 2 4; do
    host
    train $ranks "" "$dir/ranks$ranks" "${shared[@]}"
    check "$ranks ranks, two of which share sequences, have the losses of one" near "$dir/ranks1" "$dir/ranks$ranks" 1e-5
    train $ranks "" "$dir/log" "${shared[@]}" --set spillway.device=cpu
    check "and those of the cpu device" near "$dir/log" "$dir/ranks$ranks" 1e-4
    placed $ranks "shared sequences, everything on nvme, random delays" late "${shared[@]}" "${all_nvme[@]}" --set spillway.chaos_seed=3
    nccl
    placed $ranks "shared sequences" "" "${shared[@]}" --set spillway.collectives=nccl
    placed $ranks "shared sequences, state on the device, random delays" late "${shared[@]}" "${on_device[@]}" --set spillway.chaos_seed=6
    check "and nothing crosses between host and device" test "$(crossed "$dir/log")" = "0 0;"
done
# Weights that are kept by groups of two (ZeRO++'s hpZ): the same losses.
tight=(--set zero_optimization.max_live_parameters=180000)
kept=(--set zero_optimization.zero_hpz_partition_size=2)
train 4 "" "$dir/ranks4"
placed 4 "least gathered weights, kept by two" late "${tight[@]}" "${kept[@]}" --set spillway.chaos_seed=3
host
placed 4 "least gathered weights, kept by two" late "${tight[@]}" "${kept[@]}" --set spillway.chaos_seed=4
placed 4 "everything on nvme, kept by four" "" "${tight[@]}" "${all_nvme[@]}" --set zero_optimization.zero_hpz_partition_size=4
# State cut among groups of two of four ranks (MiCS).
cut=(--set zero_optimization.mics_shard_size=2)
host
train 4 "" "$dir/ranks4" "${cut[@]}"
check "groups of two have the losses of one rank" near "$dir/ranks1" "$dir/ranks4" 1e-5
placed 4 "groups, everything on nvme, small pieces, random delays" late "${cut[@]}" "${all_nvme[@]}" --set spillway.chaos_seed=3
placed 4 "groups, state on the device, small pieces" late "${cut[@]}" "${on_device[@]}" --set spillway.chaos_seed=6
nccl
placed 4 "groups, least gathered weights" late "${cut[@]}" "${tight[@]}" --set spillway.collectives=nccl
placed 4 "groups, everything on nvme, small pieces, random delays" late "${cut[@]}" "${all_nvme[@]}" --set spillway.chaos_seed=4
placed 4 "groups, state on the device, small pieces" late "${cut[@]}" "${on_device[@]}" --set spillway.chaos_seed=7
check "and nothing crosses between host and device" test "$(crossed "$dir/log")" = "0 0;"
three=("${cut[@]}" --set communication_data_type=bf16 --set spillway.micro_batches_per_pass=1)
host
train 6 "" "$dir/ranks6" "${three[@]}"
placed 6 "three groups, two passes in bf16, some state on the device" late "${three[@]}" --set zero_optimization.offload_optimizer.ratio=0.5 \
    --set spillway.chaos_seed=4
export SPW_EMULATE_DEVICES=6 wire="by nccl"
placed 6 "three groups, two passes in bf16" late "${three[@]}" --set spillway.chaos_seed=5
placed 6 "three groups, two passes in bf16, state on the device" late "${three[@]}" "${on_device[@]}" --set spillway.collectives=nccl
host
train 4 "" "$dir/ranks4" --set zero_optimization.stage=0 "${on_device[@]}"
placed 4 "groups of one, everything on nvme" late "${all_nvme[@]}" --set zero_optimization.mics_shard_size=1
nccl
placed 4 "groups of one" late --set zero_optimization.mics_shard_size=1
train 2 "" "$dir/ranks2" --set spillway.micro_batches_per_pass=2
placed 2 "passes added up in host memory" late --set spillway.micro_batches_per_pass=2 --set spillway.chaos_seed=4
nccl
placed 2 "passes added up in host memory" late --set spillway.micro_batches_per_pass=2 --set spillway.chaos_seed=4
train 2 "" "$dir/ranks2" --set communication_data_type=bf16
placed 2 "gradients in bf16 between ranks, stage 0, small pieces" late "${on_device[@]}" --set zero_optimization.stage=0 \
    --set communication_data_type=bf16 --set spillway.chaos_seed=5
host
placed 2 "gradients in bf16 between ranks, stage 0" late "${on_device[@]}" --set zero_optimization.stage=0 --set communication_data_type=bf16
train 2 "" "$dir/log" --set communication_data_type=bf16 --set spillway.device=cpu
check "as on the cpu device" near "$dir/log" "$dir/ranks2" 1e-4

# ZeRO++: weights in 8 bits; codes are made by the host, or by the device where it is linked.
codes=(--set zero_optimization.zero_quantized_weights=true)
host
train 2 "" "$dir/log"
train 2 "" "$dir/ranks2" "${codes[@]}"
check "8-bit weights change the losses" differ "$dir/log" "$dir/ranks2"
cp "$dir/log" "$dir/exact2"
check "by little" near "$dir/log" "$dir/ranks2" 2e-2
placed 2 "8-bit weights, least gathered weights, kept by two" late "${codes[@]}" "${tight[@]}" "${kept[@]}" --set spillway.chaos_seed=5
placed 2 "8-bit weights, everything on nvme, small pieces" late "${codes[@]}" "${all_nvme[@]}" --set spillway.chaos_seed=2
nccl
placed 2 "8-bit weights, least gathered weights" late "${codes[@]}" "${tight[@]}" --set spillway.collectives=nccl
placed 2 "8-bit weights, everything on nvme, kept by two, small pieces" late "${codes[@]}" "${all_nvme[@]}" "${tight[@]}" "${kept[@]}" \
    --set spillway.collectives=nccl --set spillway.chaos_seed=8
train 2 "" "$dir/log" "${codes[@]}" --set spillway.device=cpu
check "as on the cpu device" near "$dir/log" "$dir/ranks2" 1e-3
host

# Gradients in 4 bits between hosts: ranks that take themselves for those of two.
split() { # RANKS LOG OVERRIDES...
    rm -f "$2"; pids= bad=0
    for r in $(seq 0 $(($1 - 1))); do
        RANK=$r WORLD_SIZE=$1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port SPW_HOST=$((2 * r / $1)) SPW_EMULATE_STREAMS=late \
            timeout -s KILL 400 "$spw" train "$dir/gpt2.json" --quiet --set spillway.run_log="$2" "${@:3}" >"$dir/out$r" 2>&1 </dev/null &
        pids="$pids $!"
    done
    for p in $pids; do wait "$p" || bad=1; done
    cat "$dir"/out[0-9] >"$dir/out"; port=$((port + 2))
    return $bad
}
port=$((20000 + $$ % 10000))
coded=(--set zero_optimization.zero_quantized_gradients=true)
split 2 "$dir/ranks2" "${coded[@]}"
check "4-bit gradients from host to host" near "$dir/exact2" "$dir/ranks2" 3e-2
check "change the losses" differ "$dir/exact2" "$dir/ranks2"
split 2 "$dir/log" "${coded[@]}" "${on_device[@]}" --set spillway.chaos_seed=3
check "have the same losses with all state on the device, small pieces" same "$dir/ranks2" "$dir/log"
split 2 "$dir/log" "${coded[@]}" --set spillway.device=cpu
check "and near those of the cpu device" near "$dir/log" "$dir/ranks2" 1e-2
all=("${coded[@]}" "${codes[@]}" "${kept[@]}" "${tight[@]}")
split 4 "$dir/ranks4" "${all[@]}" --set spillway.micro_batches_per_pass=2
nccl
split 4 "$dir/log" "${all[@]}" --set spillway.micro_batches_per_pass=2 --set spillway.collectives=nccl
check "all of ZeRO++, four ranks on two hosts, two passes, by nccl: the losses by host" same "$dir/ranks4" "$dir/log"
split 4 "$dir/log" "${all[@]}" "${on_device[@]}" --set spillway.micro_batches_per_pass=2 --set spillway.collectives=nccl --set spillway.chaos_seed=4
check "and with all state on the device, small pieces" same "$dir/ranks4" "$dir/log"
host

# A group of MiCS on two hosts, whose weights come to each of them once.
whole=(--set zero_optimization.mics_shard_size=4) by_host=(--set zero_optimization.mics_hierarchical_params_gather=true)
split 4 "$dir/ranks4" "${whole[@]}"
split 4 "$dir/log" "${whole[@]}" "${by_host[@]}" "${tight[@]}" --set spillway.chaos_seed=5
check "weights that come once to each host, small pieces" same "$dir/ranks4" "$dir/log"
check "and nothing is said of it" test "$(grep -c hierarchical "$dir/out")" -eq 0
nccl
split 4 "$dir/log" "${whole[@]}" "${by_host[@]}" --set spillway.collectives=nccl
check "by nccl: the losses by host" same "$dir/ranks4" "$dir/log"
check "which says once that it has no effect" test "$(grep -c "mics_hierarchical_params_gather has no effect here: NCCL" "$dir/out")" -eq 1
host

# bf16 is what a GPU computes in, and gathers.
SPW_CUDA_COMPUTE= train 2 late "$dir/bf16"
sed -i 's/"grad_norm":[^,]*/"grad_norm":1/' "$dir/ranks1" "$dir/bf16"
check "2 ranks in bf16 have losses near them" near "$dir/ranks1" "$dir/bf16" 5e-3

# One of two ranks has a device with less memory, or keeps some of its state there.
port=$((20000 + $$ % 10000))
pair() { # what rank 1 has besides
    rm -f "$dir/log"
    port=$((port + 1))
    for r in 0 1; do
        own=(); [ $r = 1 ] && own=("$@")
        RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout -s KILL 400 "$spw" train "$dir/gpt2.json" --quiet \
            --set spillway.ranks=2 --set spillway.run_log="$dir/log" "${own[@]}" >"$dir/out$r" 2>&1 &
    done
    wait
    cat "$dir/out0" "$dir/out1" >"$dir/out"
}
host
train 2 "" "$dir/ranks2"
for wire in host nccl; do
    $wire
    pair --set spillway.device_memory=1900KiB
    check "2 ranks, $wire, less memory on one device" same "$dir/ranks2" "$dir/log"
    pair --set zero_optimization.offload_optimizer.ratio=0.4
    check "2 ranks, $wire, some state on one device" same "$dir/ranks2" "$dir/log"
done
# Each rank sees one GPU, its own: srun --gpus-per-task hides the others. Half of the memory would not be enough.
export SPW_EMULATE_DEVICES=1 SPW_EMULATE_FREE=1:3000
rm -f "$dir/log"
port=$((port + 1))
for r in 0 1; do
    SPW_EMULATE_HIDDEN=$r RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout -s KILL 400 "$spw" train "$dir/gpt2.json" --quiet \
        --set spillway.run_log="$dir/log" --set spillway.collectives=nccl >"$dir/out$r" 2>&1 &
done
wait
cat "$dir/out0" "$dir/out1" >"$dir/out"
check "ranks that see a GPU each have it for themselves" same "$dir/ranks2" "$dir/log"
check "and nobody warns" test "$(grep -c warning: "$dir/out")" -eq 0
unset SPW_EMULATE_FREE
host
pair --set spillway.device=cpu
check "devices of two kinds are refused" grep -qF "rank 1 computes on device cpu in fp32, rank 0 on device cuda in fp32" "$dir/out"

# A checkpoint of two ranks, all on the device, goes on with three, and theirs with one on the cpu device.
train 2 late "$dir/log" "${on_device[@]}" --set spillway.checkpoint_dir="$dir/ck" --set spillway.steps=2 &&
    train 3 "" "$dir/log2" --resume "$dir/ck" --set spillway.checkpoint_dir="$dir/ck" --set spillway.steps=3 --set spillway.eval_interval=0 &&
    train 1 "" "$dir/log3" --resume "$dir/ck" --set spillway.checkpoint_dir="$dir/ck" --set spillway.device=cpu
cat "$dir/log" "$dir/log2" "$dir/log3" | sed 's/"grad_norm":[^,]*/"grad_norm":1/' >"$dir/legs"
check "checkpoints go from ranks to ranks and from device to device" near "$dir/ranks1" "$dir/legs" 1e-4

# What cannot be linked is said by name.
refuse() { name=$1 text=$2; shift 2; "$@"; check "$name" grep -qF -- "$text" "$dir/out"; }
refuse "one GPU for two ranks is no link" "spillway.collectives nccl: ranks share a GPU" train 2 "" "$dir/log" --set spillway.collectives=nccl
check "which is said once" test "$(grep -c "^spillway: rank" "$dir/out")" -eq 1
plan() { "$spw" plan "$dir/gpt2.json" --no-measure --set spillway.ranks=2 --set train_batch_size=12 --set spillway.collectives=nccl >"$dir/out" 2>&1; }
refuse "and no plan" "spillway.collectives nccl: ranks share a GPU" plan
nccl
SPW_NCCL=$dir/none refuse "without NCCL there is none" "spillway.collectives nccl: no libnccl.so.2" train 2 "" "$dir/log" --set spillway.collectives=nccl
SPW_EMULATE_NCCL_FAIL=1:9 refuse "an operation that fails is named" "rank 1 gave up: NCCL, rank 1 of 3, all_gather: emulated system error" train 3 "" "$dir/log"
check "to all ranks" test "$(grep -cE "^spillway: rank [012]: .*NCCL, rank 1 of 3" "$dir/out")" -eq 3

# One of them dies while the others wait for it.
third_step() { grep -q '"step":3,' "$dir/log4" 2>/dev/null; }
for way in "host 3" "nccl 3" "nccl 4 ${shared[*]}"; do
    set -- $way
    $1
    rm -f "$dir/log4"
    timeout -s KILL 300 "$spw" train "$dir/gpt2.json" -n "$2" --quiet "${@:3}" --set spillway.steps=100000 --set spillway.run_log="$dir/log4" >"$dir/out" 2>&1 &
    main=$!
    comes third_step
    victim=$(pids "$dir/gpt2.json" 1 | head -n 1)
    begin=$(date +%s)
    kill -9 "$victim"
    wait $main
    check "after a kill the run fails, $way" test $? -ne 0
    check "soon" test $(($(date +%s) - begin)) -le 60 # and not when train is killed
    check "and says who is missing" grep -qE 'rank [02]: .*rank 1.*(ended|gone|died)' "$dir/out"
done
left() { # shared memory of processes that have ended; others may be at work
    for f in /dev/shm/spw-nccl-*; do
        pid=${f#*nccl-} pid=${pid%-*}
        ! kill -0 "$pid" 2>/dev/null && [ -e "$f" ] && ! echo "$before" | grep -qx "$f" && echo "$f"
    done
}
check "no shared memory is left" test -z "$(left)"
echo "1..$n"
