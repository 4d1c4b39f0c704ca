#!/bin/bash
# The program as people use it: resume, kills, wrong input, full disks, memory. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-cli-XXXXXX")
mounted=""
cleanup() { [ -n "$mounted" ] && umount "$mounted"; rm -rf "$dir"; }
trap cleanup EXIT
. tests/lib_tap.sh
nothing_left() { [ -z "$(ls -A "$dir/swap")" ]; }

mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 3000; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
cat >"$dir/tiny.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 3, "n_head": 4},
  "data": {"path": ["$dir/text.txt"], "seq_length": 32, "seed": 1},
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$dir/swap"},
                        "offload_optimizer": {"device": "nvme", "nvme_path": "$dir/swap"}},
  "spillway": {"steps": 10, "seed": 3, "device": "cpu", "chunk_elems": 16384, "checkpoint_dir": "$dir/a",
               "run_log": "$dir/a.jsonl", "eval_interval": 5, "eval_batches": 2} }
JSON
c=$dir/tiny.json

# Help, version, usage.
check "version" run --version
check "help" run help
check "help config" run help config
expect 2 "there is no command frobnicate; spillway help lists them" "unknown command is usage" frobnicate
check "which is not lost above a page of others" test "$(wc -l <"$dir/err")" -eq 1
expect 2 "unknown option" "unknown option is usage" train "$c" --wat
expect 2 "configuration file is needed" "train without configuration" train
check "doctor" run doctor "$dir"
workers() { sed -n 's/^  OK  *workers  *\([0-9]* of\) .*(\(affinity [0-9]*\), .*):\(.*\);.*/\1 \2\3/p' "$dir/out"; }
all=$(workers)
check "doctor shows the workers" test -n "$all"
# OpenBLAS may not know this CPU: its kernels fit the instructions all the same, unless somebody asks for others.
kernels() { env "$2" "$spw" doctor "$dir" | sed -n 's/.*device cpu.*, OpenBLAS for //p' | grep -Evx "$1"; }
misses() { ! kernels "$@"; }
if grep -qw avx2 /proc/cpuinfo; then
    check "matrix products use vectors" kernels 'Prescott|Core2|Penryn|Nehalem|Sandybridge|Barcelona|' SPW_ISA=scalar
    check "matrix products use the kernels that were asked for" misses Prescott OPENBLAS_CORETYPE=Prescott
fi
OMP_NUM_THREADS=7 run doctor "$dir"
check "whatever OMP_NUM_THREADS says" test "$(workers)" = "$all"
if setpriv --bounding-set=-sys_nice true 2>/dev/null && [ "$(ulimit -e)" = 0 ]; then
    meek() { setpriv --bounding-set=-sys_nice "$spw" doctor "$dir" >"$dir/out" 2>"$dir/err" && grep -q 'missing  priority' "$dir/out" && grep -q 'ulimit -e' "$dir/out"; }
    check "doctor says what a refused priority needs" meek
fi
if setpriv --bounding-set=-ipc_lock true 2>/dev/null; then
    unpinned() {
        (ulimit -l 64 && exec setpriv --bounding-set=-ipc_lock "$spw" doctor "$dir") >"$dir/out" 2>"$dir/err"
        grep -q 'missing  memlock  *64.0 KiB$' "$dir/out"
    }
    check "doctor says that a container's root may not lock memory" unpinned
fi
last=$(taskset -cp $$ | sed 's/.*[^0-9]//') # of the CPUs that this test may use
on_last() { taskset -c "$last" "$spw" "$@" >"$dir/out" 2>"$dir/err"; }
check "doctor on CPU $last alone" on_last doctor "$dir"
node=$(ls -d /sys/devices/system/cpu/cpu"$last"/node* 2>/dev/null | sed 's/.*node//')
check "shows one worker, on it" test "$(workers)" = "1 of affinity 1 node ${node:-0}: $last"

# 10 steps == 5 + save + new process + resume + 5, byte for byte.
check "train 10 steps" run train "$c" --trace "$dir/trace.json"
cp "$dir/out" "$dir/alone"
check "nothing is left in the swap folder" nothing_left
check "trace is JSON" python3 -c "import json,sys; json.load(open('$dir/trace.json'))"
monitor="--set csv_monitor.enabled=true --set csv_monitor.output_path=$dir/monitor --set csv_monitor.job_name=job"
check "train 5 steps" run train "$c" --set spillway.steps=5 --set spillway.checkpoint_dir="$dir/b" --set spillway.run_log="$dir/b.jsonl" $monitor
check "resume to 10" run train "$c" --resume "$dir/b" --set spillway.checkpoint_dir="$dir/b" --set spillway.run_log="$dir/b.jsonl" $monitor
check "csv_monitor has a row for each step of both" test "$(wc -l <"$dir/monitor/job/Train_Samples_train_loss.csv")" -eq 11
check "and for each evaluation" test "$(wc -l <"$dir/monitor/job/Train_Samples_eval_loss.csv")" -eq 3
head -c -20 "$dir/b.jsonl" >"$dir/torn.jsonl" # as a disk that is full leaves files
truncate -s -3 "$dir/monitor/job/Train_Samples_train_loss.csv"
check "resume where files end inside a line" run train "$c" --resume "$dir/b/step-5" --set spillway.checkpoint_dir= --set spillway.run_log="$dir/torn.jsonl" $monitor
check "csv_monitor ends that row" test "$(wc -l <"$dir/monitor/job/Train_Samples_train_loss.csv")" -eq 16
check "and all lines of the log but that one are JSON, the new start too" python3 -c '
import json, sys
bad = [line for line in open(sys.argv[1]) if not line.endswith("}\n")]
good = [json.loads(line) for line in open(sys.argv[1]) if line not in bad]
sys.exit(not (len(bad) == 1 and sum(x.get("run") == "spillway" for x in good) == 3))' "$dir/torn.jsonl"
same_tensors() { cmp "$1/model.safetensors" "$2/model.safetensors" && cmp "$1/optimizer-00001-of-00001.safetensors" "$2/optimizer-00001-of-00001.safetensors"; }
check "resumed state is byte-identical" same_tensors "$dir/a/step-10" "$dir/b/step-10"

# Steps whose gradient overflows are skipped, and the schedule stands still meanwhile: update u, counted from 0, has lr 2e-5 (u - 1), the first one 0.
check "fp16 with a scale that overflows" run train "$c" --set bf16.enabled=false --set fp16.enabled=true --set fp16.initial_scale_power=40 --set fp16.hysteresis=1 \
    --set 'scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_type": "linear"}}' --set spillway.steps=40 --set spillway.checkpoint_dir= --set spillway.run_log="$dir/f.jsonl"
stands_still() {
    sed -n 's/.*"lr":\([^,]*\).*"skipped":\([a-z]*\).*/\1 \2/p' "$dir/f.jsonl" |
    awk '{ d = $1 - 2e-5 * (u > 0 ? u - 1 : 0); if (d > 1e-12 || d < -1e-12) { print "# step " NR ": lr " $1 " at update " u; bad = 1 } if ($2 == "true") skipped++; else u++ } END { exit bad || skipped < 5 || u < 5 }'
}
check "has a schedule of updates" stands_still
expect 1 "step 1: the gradient is not finite at the lowest loss scale, 1.09951e+12" "a scale that cannot fall ends the run" train "$c" --set bf16.enabled=false \
    --set fp16.enabled=true --set fp16.initial_scale_power=40 --set fp16.hysteresis=1 --set fp16.min_loss_scale=1099511627776 --set spillway.checkpoint_dir= --set spillway.run_log=
# Weights that are infinite skip every step: ten in a row end the run, and no save of theirs takes the place of a good one.
expect 1 "steps 3 to 12 were skipped, because the norm of their gradients is not finite" "weights that are no numbers end the run" train "$c" --set optimizer.params.lr=1e6 \
    --set optimizer.params.weight_decay=1e6 --set spillway.steps=40 --set spillway.checkpoint_interval=1 --set spillway.keep_last=2 --set spillway.checkpoint_dir="$dir/inf" --set spillway.run_log=
check "with what to do" grep -q "go on from a checkpoint of before step 2, with a lower learning rate" "$dir/err"
check "and what was saved before" test "$(ls "$dir/inf" | xargs)" = "step-1 step-2"
check "a run that ends in the middle of such" run train "$c" --set optimizer.params.lr=1e6 --set optimizer.params.weight_decay=1e6 --set spillway.steps=6 \
    --set spillway.checkpoint_interval=1 --set spillway.keep_last=1 --set spillway.checkpoint_dir="$dir/inf6" --set spillway.run_log=
check "keeps what was saved before" test -e "$dir/inf6/step-2" -a -e "$dir/inf6/step-6" -a ! -e "$dir/inf6/step-1"
expect 1 "the weights that this run began with are no good" "so does going on from them" train "$c" --resume "$dir/inf" --set optimizer.params.lr=1e6 \
    --set optimizer.params.weight_decay=1e6 --set spillway.steps=40 --set spillway.checkpoint_dir= --set spillway.run_log=
expect 1 "the loss is not finite" "eval of such weights" eval "$dir/inf" --data "$dir/text.txt" --batches 1 --json
check "has no loss" python3 -c "import json; assert json.load(open('$dir/out'))['loss'] is None"
rm -rf "$dir/inf"
losses() { grep -o '"step":[0-9]*,"loss":[^,]*' "$1"; }
same_losses() { [ "$(losses "$1")" = "$(losses "$2")" ] && [ "$(losses "$1" | wc -l)" -eq 10 ]; }
check "resumed losses are the same characters" same_losses "$dir/a.jsonl" "$dir/b.jsonl"
check "resume with another placement and chunk size" run train "$c" --resume "$dir/b/step-5" --set spillway.checkpoint_dir="$dir/p" \
    --set spillway.chunk_elems=4096 --set 'zero_optimization.offload_param={"device":"cpu"}' --set spillway.run_log=
check "the same bits from there" same_tensors "$dir/a/step-10" "$dir/p/step-10"
for kind in 'AdamW split-bf16' 'AdamW split24-int8' 'Lion split-int8' 'SGD mixed' 'Adagrad split'; do
    name=${kind% *} format=${kind#* }
    set -- --set optimizer.type=\"$name\" --set optimizer.params.momentum=0.9 --set spillway.state_format=\"$format\" --set spillway.run_log= \
        --set optimizer.params.lr=0.001
    run train "$c" "$@" --set spillway.steps=6 --set spillway.checkpoint_dir="$dir/o1" &&
        run train "$c" "$@" --set spillway.steps=3 --set spillway.checkpoint_dir="$dir/o2" &&
        run train "$c" "$@" --set spillway.steps=6 --set spillway.checkpoint_dir="$dir/o2" --resume "$dir/o2" --set spillway.chunk_elems=4096
    check "$kind: 6 steps" test -d "$dir/o1/step-6"
    check "$kind: resumed after 3 steps, with other chunks, the same bytes" same_tensors "$dir/o1/step-6" "$dir/o2/step-6"
    rm -rf "$dir/o1" "$dir/o2"
done
expect 2 "optimizer.type: \"AdamW\" in the checkpoint, \"SGD\" now" "resume with another optimizer" train "$c" --resume "$dir/b/step-5" --set optimizer.type='"SGD"'
expect 1 "another optimizer" "also when that is meant" train "$c" --resume "$dir/b/step-5" --resume-anyway --set optimizer.type='"SGD"'
check "generate" run generate "$dir/a" --prompt "line " --tokens 20 --top-k 5
cp "$dir/out" "$dir/first"
run generate "$dir/a" --prompt "line " --tokens 20 --top-k 5
check "the same seed gives the same text" cmp -s "$dir/first" "$dir/out"

# kill -9 at any moment, saving at every step: the last checkpoint loads, the next start reclaims the swap files.
for round in 1 2 3 4 5 6; do
    "$spw" train "$c" --set spillway.steps=100000 --set spillway.checkpoint_interval=1 --set spillway.checkpoint_dir="$dir/k" --set spillway.run_log= >/dev/null 2>&1 &
    pid=$!
    for _ in $(seq 2000); do [ -n "$(ls -d "$dir"/k/step-* 2>/dev/null | grep -v partial)" ] && break; sleep 0.05; done
    sleep 0.$((RANDOM % 4))$((RANDOM % 10))
    kill -9 $pid
    { wait $pid; } 2>/dev/null
    [ $round -eq 1 ] && check "a killed run leaves its swap folder" test -n "$(ls -A "$dir/swap")"
    last=$(ls "$dir/k" | grep -v partial | sed 's/step-//' | sort -n | tail -n 1)
    check "after kill $round step $last loads and goes on" run train "$c" --resume "$dir/k" --set spillway.steps=$((last + 1)) --set spillway.checkpoint_dir= --set spillway.run_log=
    check "and the swap files are reclaimed" nothing_left
    rm -rf "$dir/k"
done

# SIGINT, SIGTERM and SIGUSR1 finish the step, save, whatever is said of the end of a whole run, clean up, and are no success.
for sig in INT TERM USR1; do
    "$spw" train "$c" --set spillway.steps=100000 --set spillway.save_at_end=false --set spillway.checkpoint_dir="$dir/$sig" --set spillway.run_log="$dir/$sig.jsonl" >"$dir/out" 2>"$dir/err" &
    pid=$!
    for _ in $(seq 1000); do [ "$(cat "$dir/$sig.jsonl" 2>/dev/null | wc -l)" -gt 3 ] && break; sleep 0.1; done
    kill -$sig $pid
    wait $pid
    check "SIG$sig ends with 4" test $? -eq 4
    check "SIG$sig saves" test -n "$(ls "$dir/$sig")"
    check "SIG$sig cleans up" nothing_left
done

# Many files too short for a held-out share of their own; a checkpoint from before says nothing of that and may mean others.
mkdir "$dir/many"
head -c 8000 "$dir/text.txt" | split -a 3 -b 80 - "$dir/many/"
m="--set data.path=$dir/many/* --set spillway.checkpoint_dir=$dir/m --set spillway.run_log="
check "many short files" run train "$c" $m
check "hold out a twentieth" grep -q ' 190 training and 10 held-out' "$dir/out"
check "and are evaluated" grep -q 'eval [0-9.]*' "$dir/out"
check "resumed, the same" run train "$c" $m --resume "$dir/m" --set spillway.steps=11
sed -i -z 's/,[[:space:]]*"held_out": [0-9]*//' "$dir"/m/step-11/spillway.json
expect 2 "held-out sequences: 1, each file's share" "an older one held out others" train "$c" $m --resume "$dir/m" --set spillway.steps=12
check "which can be meant" run train "$c" $m --resume "$dir/m" --set spillway.steps=12 --resume-anyway
check "and is as it was from then on" run train "$c" $m --resume "$dir/m" --set spillway.steps=13
expect 0 "0 sequences are held out" "nothing to evaluate on is said" train "$c" --set data.validation_split=0 --set spillway.steps=1 --set spillway.checkpoint_dir= --set spillway.run_log=

# Rotary positions go on beyond what the model says it is for: that is said, and eval keeps to what it says.
long='--set model={"model_type":"llama","vocab_size":256,"max_position_embeddings":32,"hidden_size":32,"intermediate_size":64,"num_hidden_layers":1,"num_attention_heads":2} --set data.seq_length=48 --set spillway.run_log='
expect 0 "data.seq_length 48 is more than the model's 32 positions" "windows beyond the model's positions are said by plan" plan "$c" --no-measure $long
expect 0 "data.seq_length 48 is more than the model's 32 positions" "and by train" train "$c" $long --set spillway.steps=1 --set spillway.checkpoint_dir="$dir/long"
expect 0 "sequences are of 32 tokens" "eval takes no more than these" eval "$dir/long" --data "$dir/text.txt" --batches 1
expect 2 "--seq-length 48 is more than the model's 32 positions" "but for who asks" eval "$dir/long" --data "$dir/text.txt" --batches 1 --seq-length 48
rm -rf "$dir/long"

# What does not end in time: a second signal ends it, but for SIGUSR1 before or behind it, and before the first step the first does.
"$spw" train "$c" --set gradient_accumulation_steps=9000 --set spillway.micro_batches_per_pass=1 --set spillway.checkpoint_dir= --set spillway.run_log="$dir/long.jsonl" >"$dir/out" 2>"$dir/err" &
pid=$!
for _ in $(seq 1000); do [ -s "$dir/long.jsonl" ] && break; sleep 0.1; done
sleep 0.3
kill -USR1 $pid
sleep 1.2
kill -TERM $pid
kill -TERM $pid
sleep 1.2
kill -USR1 $pid
sleep 0.2
check "two signals at once are one, and SIGUSR1 is none" kill -0 $pid
kill -TERM $pid
{ wait $pid; } 2>/dev/null
check "one a second later ends the process" test $? -eq 143
awk 'BEGIN { for (i = 0; i < 600000; i++) printf "{\"text\": \"line %d says that %d times %d is %d\"}\n", i, i, i % 7, i * (i % 7) }' >"$dir/long.jsonl"
"$spw" train "$c" --set "data.path=$dir/long.jsonl" --set data.cache_dir="$dir/cache" --set spillway.checkpoint_dir= --set spillway.run_log= --set spillway.steps=1 >"$dir/out" 2>"$dir/err" &
pid=$!
for _ in $(seq 1000); do grep -q 'making tokens of' "$dir/err" && break; sleep 0.01; done # the file has no name before it is whole
kill -TERM $pid
{ wait $pid; } 2>/dev/null
check "a signal while tokens are made too" test $? -eq 143
check "that they are is said" grep -q 'making tokens of' "$dir/err"
check "by plan too" sh -c "'$spw' plan '$c' --no-measure --set data.path='$dir/long.jsonl' --set data.cache_dir='$dir/cache' 2>&1 >/dev/null | grep -q 'making tokens of'"
check "which leaves them to train" test -z "$("$spw" train "$c" --quiet --set "data.path=$dir/long.jsonl" --set data.cache_dir="$dir/cache" --set spillway.checkpoint_dir= --set spillway.run_log= --set spillway.steps=1 --set spillway.eval_interval=0 2>&1 >/dev/null)"
rm -rf "$dir/cache" "$dir/long.jsonl"
check "the next run reclaims the swap files" run train "$c" --set spillway.steps=1 --set spillway.checkpoint_dir= --set spillway.run_log=
check "all of them" nothing_left

# While state is made, which takes long for large models: that is given up, and what was there of it is gone.
"$spw" train "$c" --set 'model={"model_type":"gpt2","vocab_size":256,"n_positions":64,"n_embd":1024,"n_layer":12,"n_head":8}' --set spillway.device_memory=auto --set spillway.host_memory=auto --set spillway.checkpoint_dir="$dir/begun" --set spillway.run_log= >"$dir/out" 2>"$dir/err" &
pid=$!
for _ in $(seq 3000); do [ -n "$(find "$dir/swap" -type f -size +0 2>/dev/null)" ] && break; sleep 0.01; done
kill -TERM $pid
{ wait $pid; } 2>/dev/null
check "a signal while state is made ends the run" test $? -eq 1
check "which says so" grep -q 'stopped while weights were drawn or loaded: nothing was computed' "$dir/err"
check "and leaves nothing" nothing_left
check "saved or not" test -z "$(ls "$dir/begun" 2>/dev/null)"

# What may be written to swap: the run saves and ends before the step that would exceed it, and counts on when resumed.
wear() { # KEY: of the last object of run log $dir/w.jsonl
    tail -n 1 "$dir/w.jsonl" | grep -o "\"$1\":[0-9]*" | sed 's/.*://'
}
w="--set spillway.checkpoint_dir=$dir/w --set spillway.run_log=$dir/w.jsonl --set spillway.tbw=1GB --set spillway.eval_interval=0"
check "train and count what is written" run train "$c" $w --set spillway.checkpoint_dir=
check "that nothing will be saved is said before" grep -q "^saves    nothing: spillway.checkpoint_dir is empty" "$dir/out"
check "the closing table shows wear" grep -qE 'wrote [0-9.]+ MiB to swap, .* a step, .* a token, [0-9.]+ % of the disk.s rated 0.001 TB' "$dir/out"
check "step lines too" grep -qE '^step 10/10 .* wrote [0-9.]+ [KMi]*B \([0-9.]+ [KMi]*B/token\)' "$dir/out"
all=$(wear bytes_written_total)
each=$(awk -v all="$all" 'BEGIN { printf "%d", all / 11 }') # once at the start, then every step
check "which every step's object says" test "$(grep -c '"bytes_written_total":' "$dir/w.jsonl")" -eq 11
budget=$((each * 6 + each / 2))
check "a budget for five steps and a half" run train "$c" $w --set spillway.write_budget=$budget
check "saves after the fifth" test -d "$dir/w/step-5" -a "$(ls "$dir/w")" = step-5
check "and says why" grep -q '^stopped before step 6: .* would exceed spillway.write_budget' "$dir/out"
within_budget() { [ "$(wear bytes_written_total)" -le "$1" ] && [ "$(wear bytes_written_total)" -gt $((each * 5)) ]; }
check "within it" within_budget $budget
check "nothing is left in swap" nothing_left
pauses() { run train "$c" "$@" --set spillway.write_budget_action=pause; test $? -eq 4; }
check "resumed with the same budget: paused, code 4" pauses $w --resume "$dir/w" --set spillway.write_budget=$budget
check "without a step" test "$(ls "$dir/w")" = step-5
check "a larger budget counts what was written before" pauses $w --resume "$dir/w" --set spillway.write_budget=$((budget + each * 4))
check "three more steps: the start is written again" test -d "$dir/w/step-8" -a ! -e "$dir/w/step-9"
check "a budget that the whole run is within: code 0" run train "$c" $w --set spillway.checkpoint_dir="$dir/w0" --set spillway.write_budget=$((all + each / 2)) --set spillway.write_budget_action=pause
check "and at its end, resumed, too" run train "$c" $w --resume "$dir/w0" --set spillway.checkpoint_dir="$dir/w0" --set spillway.write_budget=$((all + each / 2)) --set spillway.write_budget_action=pause
check "without a budget it goes on to the end" run train "$c" $w --resume "$dir/w"
check "with the uninterrupted run's bits" same_tensors "$dir/a/step-10" "$dir/w/step-10"
expect 2 "checkpoint_dir" "pause needs a checkpoint_dir" train "$c" --set spillway.checkpoint_dir= --set spillway.write_budget=1GB --set spillway.write_budget_action=pause

# Two runs on one path do not disturb each other.
"$spw" train "$c" --set spillway.checkpoint_dir="$dir/t1" --set spillway.run_log= >/dev/null 2>&1 &
pid=$!
run train "$c" --set spillway.checkpoint_dir="$dir/t2" --set spillway.run_log=
wait $pid
check "two runs on one path" same_tensors "$dir/t1/step-10" "$dir/t2/step-10"
check "they are the lone run's bits" same_tensors "$dir/t1/step-10" "$dir/a/step-10"

# Two swap folders by weight: the same losses and tensors, each folder's bytes at the start; a tuner's file says it too.
mkdir "$dir/swap2"
both() { echo "--set zero_optimization.offload_param.nvme_path=$1 --set zero_optimization.offload_optimizer.nvme_path=$1"; }
check "train over two paths, 3:1" run train "$c" $(both "[{\"path\":\"$dir/swap\",\"weight\":3},\"$dir/swap2\"]") \
    --set spillway.checkpoint_dir="$dir/two" --set spillway.run_log="$dir/two.jsonl"
check "the same losses" same_losses "$dir/a.jsonl" "$dir/two.jsonl"
check "the same tensors" same_tensors "$dir/a/step-10" "$dir/two/step-10"
share() { # PATH LOW HIGH: the share that the start shows for a path
    awk -v path="$1" -v low="$2" -v high="$3" '$1 == "path" && $2 == path { seen = 1; ok = $5 >= low && $5 <= high } END { exit !(seen && ok) }' "$dir/out"
}
check "the start shows three quarters" share "$dir/swap" 70 80
check "and a quarter" share "$dir/swap2" 20 30
rates() { XDG_CACHE_HOME="$dir/rates" run "$@"; }
two=$(both "[\"$dir/swap\",\"$dir/swap2\"]")
once="--set spillway.steps=1 --set spillway.checkpoint_dir= --set spillway.run_log="
check "plan measures both" rates plan "$c" $two
check "train finds them" rates train "$c" $two $once
check "and knows both" sh -c "grep 'of the time' '$dir/out' | grep -qv unknown"
sed -i "s#$dir/swap[|]#$dir/gone|#" "$dir/rates/spillway/rates.json"
check "without the first one's" rates train "$c" $two $once
check "the rates are not known" grep -q 'of the time; rates of the disks are unknown' "$dir/out"
check "one path shows none" test -z "$(grep '^path ' "$dir/alone")"
cat >"$dir/tuned.json" <<JSON
{ "aio": {"block_size": 65536, "queue_depth": 4, "backend": "threads"},
  "zero_optimization": {"offload_param": {"nvme_path": [{"path": "$dir/swap", "weight": 3}, "$dir/swap2"]},
                        "offload_optimizer": {"nvme_path": [{"path": "$dir/swap", "weight": 3}, "$dir/swap2"]}} }
JSON
sed -e 's|^{ |{ "include": "tuned.json", |' -e 's|, "nvme_path": "[^"]*"||' "$c" >"$dir/including.json"
check "train with a tuner's file" run train "$dir/including.json" --set spillway.checkpoint_dir="$dir/inc" --set spillway.run_log="$dir/inc.jsonl"
check "it chose the backend" grep -q "^aio .*threads" "$dir/out"
check "and the paths" share "$dir/swap2" 20 30
check "with the same losses" same_losses "$dir/a.jsonl" "$dir/inc.jsonl"
expect 2 "$dir/gone.json" "a missing included file" train "$c" --set include=gone.json
names_only() { grep -qF -- "$1" "$dir/err" && ! grep -qF -- "$2" "$dir/err"; }
expect 1 "$dir/nowhere" "a missing second path" train "$c" $(both "[\"$dir/swap\",\"$dir/nowhere\"]")
check "is named alone" names_only "$dir/nowhere" "$dir/swap"
check "and leaves nothing in the first" nothing_left
expect 3 "$dir/swap2 at most 4.00 KiB" "limits that are too small" train "$c" $(both "[{\"path\":\"$dir/swap\",\"bytes\":\"64KiB\"},{\"path\":\"$dir/swap2\",\"bytes\":4096}]")
check "leave nothing" nothing_left

# Wrong input: file, key and value in the message, the right exit code, nothing left behind.
expect 2 "zero_optimization.stagee" "unknown key" train "$c" --set zero_optimization.stagee=3
expect 2 "did you mean" "with a suggestion" train "$c" --set zero_optimization.stagee=3
expect 2 "spillway.steps" "wrong type" train "$c" --set 'spillway.steps="many"'
expect 2 "train_micro_batch_size_per_gpu" "negative size" train "$c" --set train_micro_batch_size_per_gpu=-1
expect 2 "spillway.chunk_elems" "absurd size" train "$c" --set spillway.chunk_elems=5
expect 2 "spillway.fp8 needs bf16.enabled" "8-bit floats without bf16" train "$c" --set bf16.enabled=false --set spillway.fp8=true
expect 2 "exclude each other" "bf16 and fp16" train "$c" --set bf16.enabled=true --set fp16.enabled=true
expect 1 "folder $dir/gone does not exist" "a swap folder that is not there" train "$c" --set zero_optimization.offload_param.nvme_path="$dir/gone" --set zero_optimization.offload_optimizer.nvme_path="$dir/gone"
expect 2 "$dir/none.json" "missing configuration" train "$dir/none.json"
echo '{"model": ' >"$dir/cut.json"
expect 2 "cut.json" "cut configuration" train "$dir/cut.json"
expect 1 "$dir/none.txt" "missing data" train "$c" --set "data.path=$dir/none.txt"
: >"$dir/empty.txt"
expect 1 "empty" "empty data" train "$c" --set "data.path=$dir/empty.txt"
echo short >"$dir/short.txt"
expect 1 "sequence" "data shorter than a sequence" train "$c" --set "data.path=$dir/short.txt"
expect 1 "$dir/nowhere" "missing nvme_path" train "$c" --set "zero_optimization.offload_param.nvme_path=$dir/nowhere" --set "zero_optimization.offload_optimizer.nvme_path=$dir/nowhere"
expect 3 "spillway.host_memory" "host budget too small" train "$c" --set spillway.host_memory=1MiB
need=$(sed -n 's/.*(\([0-9]*\) bytes).*/\1/p' "$dir/err" | head -n 1)
check "it names the minimum" test -n "$need"
check "and the minimum works" run train "$c" --set spillway.host_memory=$((need + 4194304)) --set spillway.steps=1 --set spillway.checkpoint_dir= --set spillway.run_log=
expect 3 "spillway.device_memory" "device budget too small" train "$c" --set spillway.device_memory=1MiB
expect 2 "model.n_layer: 3 in the checkpoint, 4 now" "resume with another model shape" train "$c" --resume "$dir/b" --set model.n_layer=4
expect 1 "missing" "also when that is meant" train "$c" --resume "$dir/b" --resume-anyway --set model.n_layer=4
expect 1 "no complete checkpoint" "resume from an empty folder" train "$c" --resume "$dir/swap"
cp -r "$dir/a/step-10" "$dir/hurt"
printf 'x' | dd of="$dir/hurt/model.safetensors" bs=1 seek=20000 conv=notrunc 2>/dev/null
expect 1 "digest" "a flipped byte in a checkpoint" generate "$dir/hurt" --prompt a
sed -i 's/"format": 2/"format": 1/' "$dir/hurt/spillway.json"
check "digests of an earlier version are not compared" run generate "$dir/hurt" --prompt a --tokens 1
check "and that is said" grep -q "not checked for damage" "$dir/err"
truncate -s 20000 "$dir/hurt/optimizer-00001-of-00001.safetensors"
expect 1 "optimizer-00001-of-00001.safetensors" "a truncated checkpoint" train "$c" --resume "$dir/hurt"
check "nothing is left after all of them" nothing_left

# A full disk and a file system without O_DIRECT on it.
mkdir "$dir/small"
if mount -t tmpfs -o size=2m tmpfs "$dir/small" 2>/dev/null; then
    mounted=$dir/small
    expect 1 "free" "a full nvme_path names needed and free bytes" train "$c" --set "zero_optimization.offload_param.nvme_path=$dir/small" --set "zero_optimization.offload_optimizer.nvme_path=$dir/small"
    check "and is left clean" test -z "$(ls -A "$dir/small")"
    check "plan shows it too" run plan "$c" --no-measure --set "zero_optimization.offload_param.nvme_path=$dir/small" --set "zero_optimization.offload_optimizer.nvme_path=$dir/small"
    check "and says what is lacking" grep -q "unless room is made: swap takes .* of the disk of $dir/small, which has 2.00 MiB free" "$dir/err"
    expect 1 "swap space in $dir/small" "a full second path is named" train "$c" $(both "[{\"path\":\"$dir/swap\",\"weight\":0.001},\"$dir/small\"]")
    check "alone" names_only "$dir/small" "$dir/swap"
    check "and both are left clean" test -z "$(ls -A "$dir/small")$(ls -A "$dir/swap")"
    expect 1 "step-10" "a full checkpoint folder" train "$c" --set "spillway.checkpoint_dir=$dir/small" --set spillway.run_log=
    check "leaves no half checkpoint" test -z "$(ls -A "$dir/small")"
    mount -o remount,ro "$dir/small"
    if touch "$dir/small/x" 2>/dev/null; then echo "ok $((n += 1)) - read-only path # SKIP it can be written"; else
        expect 1 "$dir/small" "a read-only nvme_path" train "$c" --set "zero_optimization.offload_param.nvme_path=$dir/small" --set "zero_optimization.offload_optimizer.nvme_path=$dir/small"
    fi
else
    n=$((n + 1))
    echo "ok $n - full disk # SKIP mounting is not permitted here"
fi

# A file system that refuses O_DIRECT: one warning, the same bits.
if mkdir "$dir/ram" && mount -t ramfs ramfs "$dir/ram" 2>/dev/null; then
    check "a path without O_DIRECT trains" run train "$c" --set "zero_optimization.offload_param.nvme_path=$dir/ram" --set "zero_optimization.offload_optimizer.nvme_path=$dir/ram" \
        --set spillway.checkpoint_dir="$dir/r" --set spillway.run_log=
    check "with a warning" grep -q "O_DIRECT" "$dir/err"
    check "and the same bits" same_tensors "$dir/r/step-10" "$dir/a/step-10"
    umount -l "$dir/ram" # the kernel may still be letting go of the ring's files
else
    n=$((n + 1))
    echo "ok $n - no O_DIRECT # SKIP mounting is not permitted here"
fi

# A second path and data that are not ours, as another user than root.
echo text >"$dir/secret.txt"
chmod 000 "$dir/secret.txt"
if [ "$(id -u)" = 0 ] && command -v setpriv >/dev/null; then
    chmod 755 "$dir"
    cp "$spw" "$dir/spw-copy" && chmod 755 "$dir/spw-copy" && chmod 644 "$c"
    nobody() { setpriv --reuid=65534 --regid=65534 --clear-groups "$dir/spw-copy" "$@" >"$dir/out" 2>"$dir/err"; }
    nobody train "$c"
    code=$?
    check "a checkpoint_dir of somebody else is named" test $code -eq 1 -a -n "$(grep "checkpoint_dir.*Permission" "$dir/err")"
    nobody train "$c" --set spillway.checkpoint_dir= --set "data.path=$dir/secret.txt"
    code=$?
    check "and so is a log" test $code -eq 1 -a -n "$(grep "spillway.run_log.*Permission" "$dir/err")"
    mkdir -m 1777 "$dir/shared"
    echo '{"text": "some words of a text that is longer than one window of the model, which has room for a few of its bytes"}' >"$dir/open.jsonl"
    shared=(--set zero_optimization.offload_param.nvme_path="$dir/shared" --set zero_optimization.offload_optimizer.nvme_path="$dir/shared" --set data.path="$dir/open.jsonl" --set data.text_field=text --set data.validation_split=0 --set data.cache_dir="$dir/shared" --set spillway.checkpoint_dir= --set spillway.run_log= --set spillway.steps=1)
    check "tokens in a folder of everybody" run train "$c" "${shared[@]}"
    check "of a text that all may read are read by another user" nobody train "$c" "${shared[@]}"
    chmod 600 "$dir"/shared/*.tokens
    nobody train "$c" "${shared[@]}"
    code=$?
    check "that are another user's are named" test $code -eq 1 -a -n "$(grep "data.cache_dir has to be another folder: $dir/shared/.*tokens cannot be read, nor replaced: Operation not permitted" "$dir/err")"
    nobody train "$c" --set "data.path=$dir/secret.txt" --set spillway.checkpoint_dir= --set spillway.run_log=
    code=$?
    check "unreadable data is named" test $code -eq 1 -a -n "$(grep "$dir/secret.txt.*Permission" "$dir/err")"
    # Each thread in turn is the first that the user may not have.
    chmod 777 "$dir/swap"
    threads() { (ulimit -u "$1" && exec setpriv --reuid=64321 --regid=64321 --clear-groups "$dir/spw-copy" train "$c" --set spillway.checkpoint_dir= --set spillway.run_log= >"$dir/out" 2>"$dir/err"); }
    for few in 2 3 4 5 6 7 8 9 10 11 12 13 14; do
        threads $few && break
        grep -q "^spillway: start of .* (limits: ulimit -v, ulimit -u, pids.max)" "$dir/err" || break
    done
    check "a thread that does not start names the limit, whichever it is" test $few -gt 4 -a ! -s "$dir/err"
    chmod 777 "$dir/swap" && chmod 555 "$dir/swap2"
    nobody train "$c" $(both "[\"$dir/swap\",\"$dir/swap2\"]") --set spillway.checkpoint_dir= --set spillway.run_log=
    code=$?
    check "a second path that may not be written is named" test $code -eq 1 -a -n "$(grep "$dir/swap2.*Permission" "$dir/err")"
    check "and nothing is left in the first" nothing_left
    nobody train "$c" $(both "[\"$dir/swap\"]") --set spillway.checkpoint_dir= --set spillway.run_log= --set spillway.steps=1
    check "which alone may be" test $? -eq 0
    mkdir -m 777 "$dir/theirs"
    nobody train "$c" --set spillway.checkpoint_dir="$dir/theirs" --set spillway.run_log= --set spillway.steps=2 --set spillway.checkpoint_interval=1
    chmod 000 "$dir/theirs/step-2/spillway.json"
    nobody train "$c" --resume "$dir/theirs" --set spillway.checkpoint_dir= --set spillway.run_log= --set spillway.steps=3
    code=$?
    check "an unreadable newest checkpoint is named, and no older one taken" \
        test $code -eq 1 -a -n "$(grep "step-2/spillway.json.*Permission" "$dir/err")"
else
    expect 1 "secret.txt" "unreadable data is named" train "$c" --set "data.path=$dir/secret.txt"
fi

# Examples build and run: a user's own block, from host and from disk.
check "custom optimizer" "$build/examples/custom_optimizer" "$c" 3
check "custom block on host" "$build/examples/custom_block"
check "custom block on nvme" "$build/examples/custom_block" "$dir/swap"
check "edited state on host" "$build/examples/edit_state" "$dir/edited-host"
check "edited state on nvme" "$build/examples/edit_state" "$dir/edited-nvme" "$dir/swap"
check "the same weights" cmp "$dir/edited-host/model.safetensors" "$dir/edited-nvme/model.safetensors"
check "16-bit weights are a folder like others" run inspect "$dir/edited-host"
check "with all tensors in bf16" test "$(grep -c bf16 "$dir/out")" -ge 26

# 120 M parameters, 1.5 GB of state on disk, within 700 MB of host memory (release build only: sanitizers multiply memory).
case $build in
*asan* | *tsan*) n=$((n + 1)); echo "ok $n - large model # SKIP under a sanitizer" ;;
*)
    little() { (ulimit "-$1" "$2" && timeout -s KILL 60 "$spw" train "$c" --set spillway.optimizer_threads=16 >"$dir/out" 2>"$dir/err"); test $? -eq 3 && grep -q 'ulimit -v or -d' "$dir/err" && grep -q 'a larger ulimit -v or -d, which count' "$dir/err"; }
    check "address space too small for what threads map is exit 3" little v 300000
    check "and so is room for data, in which OpenBLAS asks for ever" little d 200000
    least() { (ulimit "-$1" "$2" && timeout -s KILL 20 "$spw" --version >"$dir/out" 2>"$dir/err"); }
    check "where OpenBLAS's own threads would find no memory it begins without them (ulimit -v)" least v 150000
    check "and ends (ulimit -d)" least d 40000
    free_kib=$(df -k --output=avail "$dir" | tail -n 1)
    if [ "$free_kib" -lt 4000000 ]; then n=$((n + 1)); echo "ok $n - large model # SKIP less than 4 GB of disk"; else
        large="--set model={\"model_type\":\"gpt2\",\"vocab_size\":50304,\"n_positions\":64,\"n_embd\":768,\"n_layer\":12,\"n_head\":12}"
        check "120 M parameters train from disk" run train "$c" $large --set data.seq_length=64 --set train_micro_batch_size_per_gpu=1 \
            --set gradient_accumulation_steps=1 --set spillway.steps=2 --set spillway.eval_interval=0 --set spillway.host_memory=660MiB --set spillway.chunk_elems=1048576 \
            --set spillway.checkpoint_dir= --set spillway.run_log="$dir/large.jsonl"
        cp "$dir/out" "$dir/large.out"
        within() {
            python3 - "$dir/large.jsonl" <<'PY'
import json, sys
last = json.loads(open(sys.argv[1]).read().splitlines()[-1])
rss, dev = last["rss_peak_bytes"], last["peak_bytes"]["device"]
acc = last["peak_bytes"]["host"] + dev
print("# rss %.0f MB, device %.0f MB, accounted %.0f MB" % (rss / 1e6, dev / 1e6, acc / 1e6))
sys.exit(0 if rss - dev < 700e6 and abs(rss - acc) < 0.05 * rss else 1)
PY
        }
        check "resident memory within 700 MB of the device's, accounted within 5 %" within
        check "state is on disk" grep -q "optimizer records .* 1.*GiB" "$dir/large.out"
    fi
    ;;
esac
echo "1..$n"
