#!/bin/bash
# The program on several ranks: as with one, from one number of ranks to another, and what is said when one of them dies. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-ranks-XXXXXX")
# A child that a signal reaches before it is the program runs the trap too.
cleanup() { if [ $BASHPID -eq $$ ]; then chmod -R u+w "$dir"; rm -rf "$dir"; fi; }
trap cleanup EXIT
. tests/lib_tap.sh
train() { timeout -s KILL 400 "$spw" train "$dir/tiny.json" --quiet "$@" >"$dir/out" 2>"$dir/err"; }
says() { grep -qF -- "$1" "$dir/err" || { echo "# not said: $1"; return 1; }; }
mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 1500; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
cat >"$dir/tiny.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2},
  "data": {"path": ["$dir/text.txt"], "seq_length": 16, "seed": 1},
  "train_batch_size": 12, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "eps": 1e-4}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$dir/swap"},
                        "offload_optimizer": {"device": "nvme", "nvme_path": "$dir/swap"}},
  "spillway": {"steps": 6, "seed": 3, "device": "cpu", "chunk_elems": 4096, "eval_interval": 3, "run_log": "$dir/log"} }
JSON
# Losses of a run log against those of one rank: equal to 1e-5, the evaluations too.
near() {
    paste -d' ' <(sed -n 's/.*"step":\([0-9]*\),"loss":\([0-9.e+-]*\),.*/\1 \2/p' "$dir/log1") <(sed -n 's/.*"step":\([0-9]*\),"loss":\([0-9.e+-]*\),.*/\1 \2/p' "$dir/log") |
        awk '{ d = $2 - $4; if (d < 0) d = -d; if ($1 != $3 || d > 1e-5 * $2) { print "# step " $1 ": " $2 ", here step " $3 ": " $4; bad = 1 } } END { if (NR != 6) print "# " NR " steps"; exit bad || NR != 6 }' &&
        paste -d' ' <(sed -n 's/.*"eval_loss":\([0-9.e+-]*\).*/\1/p' "$dir/log1") <(sed -n 's/.*"eval_loss":\([0-9.e+-]*\).*/\1/p' "$dir/log") |
        awk '{ d = $1 - $2; if (d < 0) d = -d; if (d > 1e-5 * $1) { print "# evaluation: " $1 ", here " $2; bad = 1 } } END { if (NR != 2) print "# " NR " evaluations"; exit bad || NR != 2 }'
}
as_planned() {
    planned=$(sed -n '1s/.*"gather":[1-9][0-9]*,"reduce":\([1-9][0-9]*\),"trade":0}.*/\1/p' "$dir/log")
    [ -n "$planned" ] && [ "$(grep -c '"reduce":'"$planned"'[,}]' "$dir/log")" -eq 7 ]
}
# What is frozen stays on the device from step to step, so that steps differ: their mean, to 2 %.
near_the_plan() {
    sed -n '1s/.*"gather":\([0-9]*\),"reduce".*/\1/p; /"loss":/s/.*"gather":\([0-9]*\),"reduce".*/\1/p' "$dir/log" |
        awk 'NR == 1 { plan = $1 } NR > 6 { sum += $1; n++ } END { d = sum / n - plan; if (d < 0) d = -d; if (n == 0 || d > 0.02 * plan) { print "# planned " plan ", " sum / n " received"; exit 1 } }'
}
nothing_left() { [ -z "$(ls "$dir/swap")" ]; }

check "one rank" train
cp "$dir/log" "$dir/log1"
for ranks in 2 3 4; do
    check "$ranks ranks" train -n $ranks
    check "have the losses of one" near
    check "and reduce in each step what was planned" as_planned
done
check "one step of two ranks" run train "$dir/tiny.json" -n 2 --set spillway.steps=1
check "says whose memory the kernel counts too" grep -q "measured by the kernel with what was read of other ranks', " "$dir/out"
check "a frozen layer and little room, 4 ranks" train -n 4 --set train_batch_size=4 --set spillway.eval_interval=0 --set spillway.steps=66 \
    --set 'spillway.freeze=["model.layers.0.*"]' --set spillway.device_memory=3MiB --set zero_optimization.offload_param.device=none --set zero_optimization.offload_optimizer.device=none \
    --set 'model={"model_type":"llama","vocab_size":1000,"hidden_size":64,"intermediate_size":96,"num_hidden_layers":8,"num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":32,"tie_word_embeddings":false}'
check "gather on average what was planned" near_the_plan
check "stage 2 with records on nvme, 3 ranks" train -n 3 --set zero_optimization.stage=2 --set zero_optimization.offload_param.device=none
check "has the losses of one" near
check "swap files are gone" nothing_left

# Ranks that share sequences: other sequences only from group to group.
traded() {
    planned=$(sed -n '1s/.*"reduce":[1-9][0-9]*,"trade":\([1-9][0-9]*\)}.*/\1/p' "$dir/log")
    [ -n "$planned" ] && [ "$(grep -c '"trade":'"$planned"'[,}]' "$dir/log")" -eq 7 ]
}
for ranks in 2 4; do
    check "$ranks ranks, two of which share sequences" train -n $ranks --set sequence_parallel_size=2
    check "have the losses of one" near
    check "and trade in each step what was planned" traded
done
check "and say so" run train "$dir/tiny.json" -n 2 --set sequence_parallel_size=2 --set spillway.steps=1
check "with the positions of each" grep -q "shared   each sequence by 2 ranks, 8 positions and " "$dir/out"
train -n 2 --set sequence_parallel_size=2 --set data.seq_length=15
check "positions that ranks cannot share out are a mistake" test $? -eq 2
check "which is said" says "sequence_parallel_size 2 does not divide data.seq_length 15"
train --set sequence_parallel_size=2
check "and so is one rank" test $? -eq 2
check "with what starts more" says "sequence_parallel_size 2 does not divide 1 rank (train -n 2, plan --set spillway.ranks=2)"

# A batch is a batch however many share it.
check "3 steps on 4 ranks" train -n 4 --set spillway.checkpoint_dir="$dir/c" --set spillway.steps=3
check "one more on 2 that share sequences" train -n 2 --set sequence_parallel_size=2 --set spillway.eval_interval=0 --set spillway.checkpoint_dir="$dir/c" --set spillway.steps=4 --resume "$dir/c"
check "one more on 3" train -n 3 --set spillway.eval_interval=0 --set spillway.checkpoint_dir="$dir/c" --set spillway.steps=5 --resume "$dir/c"
check "one more on one" train --set spillway.checkpoint_dir="$dir/c" --resume "$dir/c"
check "have the losses of one" near
check "the checkpoint is whole" sh -c "$spw inspect $dir/c --digest >$dir/out 2>$dir/err"
printf 'spwx' | dd of="$dir/c/step-6/optimizer-00001-of-00001.safetensors" bs=1 seek=20001 conv=notrunc 2>/dev/null # of one rank's part
train -n 3 --set spillway.steps=7 --resume "$dir/c"
check "a byte that changed is found by ranks together" test $? -eq 1
check "which say where" grep -q "optimizer-00001-of-00001.safetensors: digest is" "$dir/err"
check "background saves on 4 ranks" train -n 4 --set spillway.checkpoint_dir="$dir/d" --set spillway.checkpoint_interval=1 --set spillway.keep_last=2
check "keep the last two" test "$(ls "$dir/d" | xargs)" = "step-5 step-6"

# What is written to swap is counted for all ranks, and so is what the budget is for, whatever the number of ranks.
wrote() { sed -n 's/.*"bytes_written": *\([0-9]*\).*/\1/p' "$dir/$1/step-$2/spillway.json"; }
about() { awk -v a="$1" -v b="$2" 'BEGIN { print "# " a ", " b; exit !(a > 0 && b > 0 && a < 1.5 * b && b < 1.5 * a) }'; }
w="--set spillway.eval_interval=0 --set spillway.write_budget_action=pause"
check "5 steps on one rank" train $w --set spillway.checkpoint_dir="$dir/w1" --set spillway.steps=5
check "and on 4" train -n 4 $w --set spillway.checkpoint_dir="$dir/w4" --set spillway.steps=5
check "write about the same: ranks pad their parts" about "$(wrote w1 5)" "$(wrote w4 5)"
each=$(($(wrote w4 5) / 6)) # once at the start, then every step
train -n 4 $w --set spillway.checkpoint_dir="$dir/w5" --set spillway.write_budget=$((each * 4 + each / 2))
check "a budget for three steps and a half: 4 ranks pause together" test $? -eq 4
check "after the third" test "$(ls "$dir/w5")" = step-3
train $w --set spillway.checkpoint_dir="$dir/w5" --resume "$dir/w5" --set spillway.write_budget=$((each * 4 + each / 2))
check "one rank has no more of it" test $? -eq 4
check "one rank goes on with more" train $w --set spillway.checkpoint_dir="$dir/w5" --resume "$dir/w5" --set spillway.steps=4 --set spillway.write_budget=$((each * 6 + each / 2))
check "and counts on" about "$(wrote w5 4)" $((each * 6))

# Tokens are made once on a host.
sed 's/.*/{"text": "&"}/' "$dir/text.txt" >"$dir/lines.jsonl"
lines() { SPW_VERBOSE=1 train "$@" --set "data.path=$dir/lines.jsonl" --set data.cache_dir="$dir/cache" --set spillway.eval_interval=0 --set spillway.steps=1; }
check "JSON lines on 4 ranks" lines -n 4
check "become tokens once" test "$(grep -c 'making tokens of' "$dir/err")" -eq 1

# A rank that does not fit: all end with 3, whoever ends first.
by_hand() { # rank, its options
    RANK=$1 LOCAL_RANK=$1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout -s KILL 400 \
        "$spw" train "$dir/tiny.json" --quiet "${@:2}" >"$dir/out$1" 2>"$dir/err$1"
}
port=$((30000 + $$ % 2700)) # below those that the kernel gives to connections, above those of other tests
by_hand 0 --set spillway.host_memory=8GiB &
by_hand 1 --set spillway.host_memory=4MiB
check "rank 1 does not fit" test $? -eq 3
wait $!
check "rank 0, which does, ends with the same code" test $? -eq 3
check "rank 1 shows the table" grep -q '^  plan ' "$dir/err1"

# Folders of one name on two hosts, which are not one: said before the first step, not when it is saved.
mkdir "$dir/here" "$dir/there"
port=$((port + 1))
by_hand 0 --set spillway.checkpoint_dir="$dir/here" &
by_hand 1 --set spillway.checkpoint_dir="$dir/there"
check "rank 1 does not see the folder of checkpoints" test $? -eq 2
wait $!
check "which ends rank 0 with the same code" test $? -eq 2
check "is said" grep -q "rank 1: spillway.checkpoint_dir $dir/there is not rank 0's folder here" "$dir/err1"
check "before the first step" test ! -s "$dir/out0"
check "and leaves nothing" test -z "$(ls -A "$dir/here" "$dir/there" | grep spillway)"
port=$((port + 1))
whole="--set zero_optimization={\"stage\":0} --set spillway.checkpoint_interval=1"
by_hand 0 --set spillway.checkpoint_dir="$dir/here" $whole &
by_hand 1 --set spillway.checkpoint_dir="$dir/there" $whole
check "in stage 0 rank 0 alone saves" test $? -eq 0
wait $!
check "all" test $? -eq 0 -a -s "$dir/here/step-1/spillway.json" -a -z "$(ls -A "$dir/there")"

# Neither has too little by itself: one has no device memory for all experts at once, the other none in the host for as many turns, whose tables take more.
cat >"$dir/moe.json" <<JSON
{ "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
  "num_hidden_layers": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 64,
  "num_experts_per_tok": 2, "max_position_embeddings": 64 }
JSON
turns() { # rank, its options
    by_hand "$1" --set "model=$(tr -d '\n' <"$dir/moe.json")" --set train_batch_size=2 --set spillway.chunk_elems=8192 \
        --set zero_optimization.offload_param.device=cpu --set zero_optimization.offload_optimizer.device=cpu "${@:2}"
}
least() { sed -n 's/.* needs\{0,1\} at least [^(]*(\([0-9]*\) bytes).*/\1/p' "$1" | head -n 1; }
for lack in host device; do
    for many in 1 64; do
        port=$((port + 1))
        turns 0 --set spillway.expert_turns=$many --set spillway.${lack}_memory=4096 &
        turns 1 --set spillway.expert_turns=$many
        wait $!
        eval "$lack$many=$(least "$dir/err0")"
    done
done
echo "# host memory $host1 for all at once, $host64 one by one; of the device $device1 and $device64"
check "all at once take less of the host, one by one of the device" test "$host1" -lt "$host64" -a "$device64" -lt "$device1"
port=$((port + 1))
turns 0 --set spillway.host_memory=$(((host1 + host64) / 2)) &
turns 1 --set spillway.device_memory=$((device64 + 4096))
check "ranks that fit alone and not together" test $? -eq 3
wait $!
check "end with the same code" test $? -eq 3
check "rank 0 says what it lacks" grep -q "rank 0: spillway.host_memory is" "$dir/err0"
check "and rank 1 what it does" grep -q "rank 1: spillway.device_memory is" "$dir/err1"
check "with what would do" grep -q "fits with: --set spillway.device_memory=$device1 " "$dir/err1"
port=$((port + 1))
turns 0 --set spillway.host_memory=$(((host1 + host64) / 2)) &
turns 1 --set spillway.device_memory="$device1"
check "which does" test $? -eq 0
wait $!
check "on both" test $? -eq 0
check "not with nothing" test "$(cat "$dir/err0" "$dir/err1" | grep -c 'fits with:$')" = 0

# Ranks that were started by hand with something else: each would change its part of one model by rules of its own.
pair() { # what both have; what rank 1 has besides is in others
    by_hand 0 "$@" &
    by_hand 1 "$@" $others
    rc=$?
    wait $!
    rc="$? $rc"
}
differs() { # name, what rank 1 has besides, what is said of it; then what both have
    others=$2 want=$3 name=$1
    shift 3
    rm -f "$dir/log"
    pair "$@"
    check "rank 1 with another $name: both end with 2" test "$rc" = "2 2"
    cat "$dir/err0" "$dir/err1" >"$dir/err"
    check "which is named" says "  rank 1: $want"
    check "before the first step" test ! -e "$dir/log"
}
port=$((port + 1))
differs "learning rate" "--set optimizer.params.lr=0.1" "optimizer.params.lr: 0.002 on rank 0, 0.1 here"
differs seed "--set spillway.seed=4" "spillway.seed: 3 on rank 0, 4 here"
differs batch "--set train_batch_size=8" "train_batch_size: 12 on rank 0, 8 here"
differs "number of steps" "--set spillway.steps=5" "spillway.steps: 6 on rank 0, 5 here"
differs "model" "--set model.n_layer=1" "model.n_layer: 2 on rank 0, 1 here"
differs "ZeRO stage" "--set zero_optimization.stage=2" "zero_optimization.stage: 3 on rank 0, 2 here" --set zero_optimization.offload_param.device=none
differs "way between ranks" "--set spillway.collectives=host" "spillway.collectives: \"auto\" on rank 0, \"host\" here"
differs "way of fetching ahead" "--set spillway.prefetch=false" "spillway.prefetch: true on rank 0, false here"
differs "number of elements fetched ahead" "--set zero_optimization.stage3_prefetch_bucket_size=9" "zero_optimization.prefetch_bucket_size: "
differs "evaluation" "--set spillway.eval_interval=0" "spillway.eval_interval: 3 on rank 0, 0 here"
differs "folder of checkpoints" "--set spillway.checkpoint_dir=" "spillway.checkpoint_dir: \"$dir/cd\" on rank 0, \"\" here" --set spillway.checkpoint_dir="$dir/cd"
differs "interval of saves" "--set spillway.checkpoint_interval=2" "spillway.checkpoint_interval: 3 on rank 0, 2 here" --set spillway.checkpoint_interval=3
head -n 1000 "$dir/text.txt" >"$dir/less.txt"
differs "text" "--set data.path=$dir/less.txt" "bytes of training data: "
differs "share of a source" "--set data.sources=[{\"path\":\"$dir/text.txt\",\"weight\":2},\"$dir/less.txt\"]" "data.sources: " \
    --set data.path=null --set data.sources="[\"$dir/text.txt\",\"$dir/less.txt\"]"
train --set spillway.checkpoint_dir="$dir/r" --set spillway.checkpoint_interval=1 --set spillway.steps=3
differs "checkpoint to go on from" "--resume $dir/r/step-2" "step of the checkpoint to go on from: 3 on rank 0, 2 here" --resume "$dir/r/step-3"
"$spw" export "$dir/r/step-3" --to "$dir/weights" >"$dir/out" 2>"$dir/err" && mkdir "$dir/none" && cp "$dir/weights/config.json" "$dir/none"
check "a folder of weights, and one without" test -e "$dir/weights/model.safetensors" -a -e "$dir/none/config.json"
differs "folder of the model, without weights" "--set model={\"path\":\"$dir/none\"}" "model.path: weights on rank 0, none here" --set model="{\"path\":\"$dir/weights\"}"
"$spw" export "$dir/r/step-2" --to "$dir/earlier" >"$dir/out" 2>"$dir/err"
differs "folder's weights" "--set model={\"path\":\"$dir/earlier\"}" "model.path: $dir/earlier has other weights here than rank 0 reads" \
    --set model="{\"path\":\"$dir/weights\"}"
# What may be another thing on each host.
cp "$dir/text.txt" "$dir/copy.txt"
mkdir "$dir/swap2"
others="--set zero_optimization.offload_param.nvme_path=$dir/swap2 --set zero_optimization.offload_optimizer.nvme_path=$dir/swap2
        --set spillway.host_memory=6GiB --set aio.queue_depth=8 --set data.path=$dir/copy.txt --set spillway.optimizer_threads=1"
rm -f "$dir/log"
pair --set spillway.steps=6
check "other swap, budgets, threads and a copy of the text are taken" test "$rc" = "0 0"
check "and have the losses of one" near

# A rank without room for what reads frozen weights in their file: all ranks copy them.
still='--set spillway.freeze=["*.mlp.*"] --set spillway.eval_interval=0'
check "frozen weights" train -n 2 $still --set spillway.checkpoint_dir="$dir/f" --set spillway.steps=2
case $build in *asan | *tsan) ;; *) # whose processes are never of one size
    others="--set spillway.host_memory=1MiB"
    pair $still --resume "$dir/f"
    least=$(grep -o '([0-9]* bytes)' "$dir/err1" | grep -o '[0-9]*' | head -n 1)
    others="--set spillway.host_memory=$((least + 1048576))"
    pair $still --resume "$dir/f"
    check "one rank has the least memory: both train" test "$rc" = "0 0"
    cp "$dir/err0" "$dir/err"
    check "which says what is done" says "frozen weights are copied" ;;
esac

rm -f "$dir/log"
others="--set spillway.device_memory=700KiB --set zero_optimization.stage3_max_live_parameters=9000 --set spillway.activations=host"
pair --set spillway.steps=6
check "a device with less memory is taken" test "$rc" = "0 0"
check "and has the losses of one, too" near

# A bound inside a page of what the other can gather.
rm -f "$dir/log"
on_host="--set spillway.activations=host"
plan() { "$spw" plan "$dir/tiny.json" --no-measure --set spillway.ranks=2 $on_host --set spillway.device_memory=$1 2>&1; }
least=$(plan 4096 | sed -n 's/.* needs* at least [^(]*(\([0-9]*\) bytes).*/\1/p')
block=$(plan "$least" | awk '/^ *gathered units.*device_memory/ { print $3 * 1024 / 4 }')
others="--set spillway.device_memory=$((least + 8192)) --set zero_optimization.stage3_max_live_parameters=1000000"
pair $on_host --set spillway.steps=6 --set zero_optimization.stage3_max_live_parameters=$((block + 500))
check "a bound a little above what another device has room for is taken" test "$rc" = "0 0"
check "and has the losses of one, again" near

# Mistakes are said once.
train -n 3 --set spillway.nix=1
check "a wrong key ends with 2" test $? -eq 2
check "and one line" test "$(wc -l <"$dir/err")" -eq 1
train -n 3 --set train_batch_size=10
check "a batch that cannot be shared ends with 2" test $? -eq 2
check "and says why" says "times 3 ranks"
train -n 2 --set spillway.host_memory=4MiB
check "what does not fit ends with 3" test $? -eq 3
check "and the table once" test "$(grep -c '^  plan ' "$dir/err")" -eq 1
train --set spillway.ranks=4
check "ranks without a launcher" test $? -eq 2
check "with the way to start them" says "spillway train -n 4"

# Between choosing the port and rank 0's listening there somebody else wants it.
cat >"$dir/thief.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
int bind(int fd, const struct sockaddr *at, socklen_t bytes)
{
    int (*real)(int, const struct sockaddr *, socklen_t) = (int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "bind");
    if (at->sa_family == AF_INET && ((const struct sockaddr_in *)at)->sin_port != 0)
        (void)real(socket(AF_INET, SOCK_STREAM, 0), at, bytes);
    return real(fd, at, bytes);
}
C
case $build in
*asan | *tsan) skip "a port that somebody else wants" "sanitizers come first" ;;
*)
    if ${CC:-gcc} -O1 -shared -fPIC -o "$dir/thief.so" "$dir/thief.c" -ldl 2>"$dir/err"; then
        LD_PRELOAD=$dir/thief.so train -n 2 --set spillway.steps=1
        check "a port that somebody else wants is the ranks'" test $? -eq 0
    else
        skip "a port that somebody else wants" "no compiler"
    fi ;;
esac

# What another launcher left in the environment.
RANK=0 WORLD_SIZE=2 train -n 2
check "-n inside another launcher's rank ends with 2" test $? -eq 2
check "and says what to do" says "leave out -n, or unset RANK"
OMPI_COMM_WORLD_SIZE=3 train -n 2
check "-n under mpirun ends with 2" test $? -eq 2
check "and says that, too" says "one of 3: leave out -n, or mpirun"
check "-n in a shell of srun's" env PMIX_RANK=0 PMI_RANK=0 SPW_MPI_PLUGIN=/nowhere "$spw" train "$dir/tiny.json" --quiet -n 2 --set spillway.steps=1
check "one rank there" env PMI_RANK=0 PMI_SIZE=1 SPW_MPI_PLUGIN=/nowhere "$spw" train "$dir/tiny.json" --quiet --set spillway.steps=1

# One of them dies, or fails: all end, and say what happened.
fifth_step() { grep -q '"step":5,' "$dir/log" 2>/dev/null; }
rm -f "$dir/log"
train -n 3 --set spillway.steps=100000 --set spillway.checkpoint_dir="$dir/k" --set spillway.checkpoint_interval=1 --set spillway.keep_last=2 &
main=$!
comes fifth_step
victim=$(pids "$dir/tiny.json" 1 | head -n 1)
check "ranks are there to be killed" test -n "$victim"
begin=$(date +%s)
kill -9 "$victim"
wait $main
check "after a kill the run fails" test $? -ne 0
check "soon" test $(($(date +%s) - begin)) -le 60 # and not when train is killed
check "the launcher names the signal" says "rank 1 was ended by signal 9"
check "rank 0 says who is missing" sh -c "grep -E 'spillway: rank 0: .*rank 1' '$dir/err' | grep -qE 'ended|gone|died'"
check "rank 2 too" sh -c "grep -E 'spillway: rank 2: .*rank 1' '$dir/err' | grep -qE 'ended|gone|died'"
check "the next run clears what it left" train -n 2 --set spillway.steps=1
check "in the swap folder" nothing_left

# What it had saved is whole, and goes on as a run of as many ranks does that nobody disturbed: to the last digit, because it
# may be of hundreds of steps, after which the rounding of other sums shows.
loss_of() { sed -n "s/.*\"step\":$1,\"loss\":\([0-9.e+-]*\),.*/\1/p" "$dir/log" | tail -n 1; }
saved=$(ls "$dir/k" | sed -n 's/^step-\([0-9]*\)$/\1/p' | sort -n | tail -n 1)
end=$((${saved:-0} + 2))
check "the killed run left a checkpoint" test -n "$saved"
check "which is whole" sh -c "$spw inspect $dir/k/step-$saved --digest >$dir/out 2>$dir/err"
rm -f "$dir/log"
check "undisturbed" train -n 3 --set spillway.steps=$saved --set spillway.eval_interval=0 --set spillway.checkpoint_dir="$dir/u"
check "and resumed" train -n 2 --set spillway.steps=$end --set spillway.eval_interval=0 --resume "$dir/u"
want=$(loss_of $end)
rm -f "$dir/log"
check "the killed run is resumed on 2 ranks" train -n 2 --set spillway.steps=$end --set spillway.eval_interval=0 --resume "$dir/k"
got=$(loss_of $end)
check "and gets to the same loss ($want, $got)" test -n "$want" -a "$want" = "$got"

train -n 3 --set spillway.steps=1 --set zero_optimization='{"stage":2,"cpu_offload":true}'
check "what the configuration is warned of is said once" test "$(grep -c 'cpu_offload is deprecated' "$dir/err")" = 1

for sig in INT USR1; do
    rm -f "$dir/log"
    train -n 3 --set spillway.steps=100000 &
    main=$!
    comes fifth_step
    kill -$sig $(pids "$dir/tiny.json" | head -n 1)
    wait $main
    check "SIG$sig ends all ranks after the same step, with 4" test $? -eq 4
    check "and leaves nothing" nothing_left
done
# Also while they are being started: it reaches those that are there and those that come.
begin=$(date +%s)
for i in 01 02 03 04 05 06 07 08 09 10 11 12; do
    "$spw" train "$dir/tiny.json" --quiet -n 8 --set spillway.steps=100000 >"$dir/out" 2>"$dir/err" &
    sleep 0.0$i
    kill -TERM $!
    wait $!
done
check "SIGTERM at the start ends all ranks at once" test $(($(date +%s) - begin)) -le 300
check "the next run clears what they left" train -n 2 --set spillway.steps=1
check "all of it" nothing_left
echo "1..$n"
