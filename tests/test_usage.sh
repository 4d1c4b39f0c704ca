#!/bin/bash
# The program at its edges: output that is full, closed or no longer read, names that cannot be written, options that are
# mistyped, signals of a terminal that goes away. Says so in time, with the right exit code, and leaves nothing behind. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$PWD/$build/spillway
[ -x "$spw" ] || spw=$build/spillway
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-usage-XXXXXX")
mounted=""
cleanup() { [ -n "$mounted" ] && umount -l "$mounted"; rm -rf "$dir"; }
trap cleanup EXIT
. tests/lib_tap.sh
nothing_left() { [ -z "$(ls -A "$dir/swap")" ]; }
mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 500; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
cat >"$dir/tiny.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2},
  "data": {"path": ["$dir/text.txt"], "seq_length": 32, "seed": 1}, "train_micro_batch_size_per_gpu": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$dir/swap"},
                        "offload_optimizer": {"device": "nvme", "nvme_path": "$dir/swap"}},
  "spillway": {"steps": 2, "seed": 3, "device": "cpu", "chunk_elems": 4096, "checkpoint_dir": "$dir/a", "eval_interval": 0} }
JSON
c=$dir/tiny.json
none="--set spillway.checkpoint_dir="
check "train" run train "$c"
check "says nothing more in a new folder" test -z "$(grep -v 'refuses O_DIRECT' "$dir/err")"
last=$(sed -n 's/^step 2\/2  loss \([0-9.]*\) .*/\1/p' "$dir/out")
check "the closing table ends with the last step's loss" grep -q "loss [0-9.]* -> $last\$" "$dir/out"

expect 0 "holds $dir/a/step-2 of an earlier run" "a folder with another run's checkpoints is said" train "$c" --set spillway.steps=1
rm -rf "$dir/a/step-1"
export SPW_ISA=avx1024
expect 0 'variable SPW_ISA is "avx1024", and this CPU has no such instruction set: it takes ' "an instruction set that is none" train "$c" $none
check "is said once" test "$(grep -c SPW_ISA "$dir/err")" -eq 1
expect 0 'SPW_ISA is "avx1024"' "and of ranks once" train "$c" $none -n 2
check "by the first" test "$(grep -c SPW_ISA "$dir/err")" -eq 1
unset SPW_ISA
# Limits of the shell: what can be raised is, and the others are named with what they stopped.
within() { (ulimit $limit && exec timeout -s KILL 60 "$spw" "$@" >"$dir/out" 2>"$dir/err"); }
expects=within
limit="-S -s 128"
check "a small soft limit of the stack is raised" within train "$c" $none
limit="-s 128"
expect 1 "spillway: the stack's limit is 128 KiB (ulimit -s), and 1024 KiB are needed" "a small hard one is said" train "$c" $none
limit="-s 1024"
check "as much is enough" within train "$c" $none
limit="-f 1"
expect 1 "swap space in $dir/swap: probe write " "a limit of files that stops the first block names the folder" train "$c" $none
check "and the limit" said "ulimit -f"
limit="-f 50"
expect 1 "File too large (limit: ulimit -f, or the file system's own)" "one that stops the swap file is named" train "$c" $none
limit="-n 8"
expect 1 "Too many open files (limit: ulimit -n)" "and of open files" train "$c" $none
expects=run
check "nothing is left of them" nothing_left
# A schedule that ends before the training, of which nothing is learned from then on.
decay() { echo "scheduler={\"type\":\"WarmupDecayLR\",\"params\":{\"warmup_num_steps\":1,\"warmup_max_lr\":0.01,\"total_num_steps\":$1}}"; }
for command in train plan; do
    expect 0 "scheduler.params.total_num_steps 1 is less than spillway.steps 2: the learning rate is 0 from then on" "a schedule that is through too soon, to $command" $command "$c" $none --set "$(decay 1)"
done
# Codes of what is frozen, and nothing is.
for command in train plan; do
    expect 0 "warning: spillway.frozen_codes changes nothing: no weight is frozen" "codes without adapters, to $command" $command "$c" $none --set spillway.frozen_codes=int4
done
check "codes beside adapters" run train "$c" $none --set spillway.frozen_codes=int4 --set spillway.lora='{"rank":2,"targets":["c_fc"]}'
check "are as they should be" test "$(grep -c frozen_codes "$dir/err")" -eq 0
# Other keys of which there is nothing here.
while IFS='|' read -r set why; do
    expect 0 "warning: ${set%%=*} changes nothing: $why" "$set here" plan "$c" --no-measure $none --set "$set"
done <<KEYS
zero_optimization.zero_quantized_nontrainable_weights=true|no weight is frozen
zero_optimization.zero_hpz_partition_size=2|there is one rank
zero_optimization.mics_shard_size=2|there is one rank
spillway.nearest_moments=true|spillway.state_format is not split-bf16
spillway.reference_steps=9|spillway.preference has no reference
spillway.router_balance=0.01|the model has no experts
data.messages_field=talk|data.chat is not set
data.chosen_field=good|spillway.preference.loss is not set
data.rejected_field=bad|spillway.preference.loss is not set
spillway.checkpoint_interval=1|spillway.checkpoint_dir is not set
KEYS
check "several" sh -c "'$spw' train '$c' $none --set spillway.nearest_moments=true --set spillway.router_balance=0.01 2>&1 >/dev/null | grep -c 'changes nothing' | grep -qx 2"
check "a schedule that lasts" run train "$c" $none --set "$(decay 2)"
check "is no matter" test "$(grep -c total_num_steps "$dir/err")" -eq 0

# Standard output that cannot take it: exit code 1, whatever the command.
if [ -c /dev/full ]; then
    full() { "$spw" "$@" >/dev/full 2>"$dir/err"; test $? -eq 1 -a -n "$(grep 'No space left' "$dir/err")"; }
    check "a full output of help" full help config
    check "of plan" full plan "$c" --no-measure
    check "of train" full train "$c" $none
    check "of inspect" full inspect "$dir/a" --json
    check "of generate" full generate "$dir/a" --prompt hi --tokens 3
    seq 40 >"$dir/forty.txt"
    check "of many texts" full generate "$dir/a" --prompts "$dir/forty.txt" --tokens 3 --batch-size 1
    check "ends what would be drawn for nobody" test -z "$(grep tokens/s "$dir/err")"
    check "of eval" full eval "$dir/a" --data "$dir/text.txt" --batches 1
    check "of a benchmark" full bench adam --smoke --format fp32
fi
# A log that is full: the run goes on without it, and says so once.
if [ -c /dev/full ]; then
    expect 0 "warning: spillway.run_log /dev/full: No space left on device; no more is written there" "a full run_log is said" \
        train "$c" $none --set spillway.run_log=/dev/full
    check "once" test "$(grep -c run_log "$dir/err")" -eq 1
fi
# So is a timeline, behind what is said of the run, whose exit code it is.
if [ -c /dev/full ]; then
    expect 1 "write /dev/full: No space left on device" "a full disk for the timeline is an error" train "$c" $none --trace /dev/full --set spillway.run_log="$dir/closed.jsonl"
    check "the run is told to its end" test -n "$(grep 'peak memory' "$dir/out")" -a -n "$(grep '"run":"closed"' "$dir/closed.jsonl")"
fi
# One that is closed: no file takes its number, and with it what is said.
"$spw" train "$c" $none --set spillway.steps=1000000 >&- 2>&- <&- &
pid=$!
swapping() { [ -n "$(ls -A "$dir/swap")" ]; }
comes swapping
check "what is closed stays empty" test "$(readlink /proc/$pid/fd/1 /proc/$pid/fd/2 | sort -u)" = /dev/null
kill -KILL $pid
{ wait $pid; } 2>/dev/null
check "the next run reclaims what was killed" run train "$c" $none
check "all of it" nothing_left

# Nobody reads on, or the terminal goes away: the run ends as it does by Ctrl-C.
rm -rf "$dir/k"
"$spw" train "$c" --set spillway.steps=1000000 --set spillway.checkpoint_dir="$dir/k" 2>"$dir/err" | head -n 1 >/dev/null
check "train | head saves" test -n "$(ls "$dir/k" 2>/dev/null)"
check "and says so where it is read" grep -qE "nobody reads the output any more: stopped after step [0-9]+ of 1000000; to go on: --resume $dir/k/step-[0-9]+$" "$dir/err"
check "and leaves no swap file" nothing_left
"$spw" generate "$dir/a" --prompt hi --tokens 1000000 --nvme "$dir/swap" 2>"$dir/err" | head -c 10 >/dev/null
check "generate | head leaves no swap file" nothing_left
hang_up() { # WRAPPER...: a run of its own that gets SIGHUP after some steps
    rm -rf "$dir/k" "$dir/hup.jsonl"
    "$@" "$spw" train "$c" --set spillway.steps=1000000 --set spillway.checkpoint_dir="$dir/k" --set spillway.run_log="$dir/hup.jsonl" >"$dir/out" 2>"$dir/err" &
    pid=$!
    stepping() { [ "$(cat "$dir/hup.jsonl" 2>/dev/null | wc -l)" -gt 3 ]; }
    comes stepping
    kill -HUP $pid
}
default="env --default-signal=HUP" # whoever runs this may ignore it
$default true 2>"$dir/err" || default=env
hang_up $default
wait $pid
check "SIGHUP ends with 4" test $? -eq 4
check "saves" test -n "$(ls "$dir/k" 2>/dev/null)"
check "and leaves no swap file" nothing_left
hang_up nohup
before=$(wc -l <"$dir/hup.jsonl")
goes_on() { [ "$(wc -l <"$dir/hup.jsonl")" -gt $((before + 3)) ]; }
check "under nohup it goes on" comes goes_on
kill -TERM $pid
wait $pid
rm -f "$dir/out" # what a run before wrote there is no sign of this one
"$spw" generate "$dir/a" --prompt hi --tokens 1000000 --nvme "$dir/swap" >"$dir/out" 2>"$dir/err" &
pid=$!
drawing() { [ "$(cat "$dir/out" 2>/dev/null | wc -c)" -gt 20 ]; }
comes drawing
kill -TERM $pid
wait $pid
check "a signal ends generate" test $? -eq 1 -a -n "$(grep stopped "$dir/err")"
check "which leaves no swap file" nothing_left
# Its name goes as soon as it is open.
"$spw" bench io "$dir/swap" --size 64MiB --seconds 20 >"$dir/out" 2>"$dir/err" &
pid=$!
holds_file() { ls -l /proc/$pid/fd 2>/dev/null | grep -q "spw-bench-.*(deleted)"; }
check "bench io holds a file" comes holds_file
kill -KILL $pid
{ wait $pid; } 2>/dev/null
check "of which a kill leaves nothing" nothing_left

# What could not be written at the end is said at the beginning.
expect 1 "spillway.checkpoint_dir $c/x" "a checkpoint_dir below a file" train "$c" --set spillway.checkpoint_dir="$c/x"
check "is said before the first step" test ! -s "$dir/out"
expect 1 "csv_monitor.output_path $c/x/job: $c is not a folder" "a monitor below a file, before data are looked for" train "$c" $none --set csv_monitor='{"enabled":true,"output_path":"'"$c"'/x","job_name":"job"}' --set data.path="$dir/gone.txt"
expect 1 "spillway.run_log $c/x: $c is not a folder" "a log below a file, too" train "$c" $none --set spillway.run_log="$c/x/log" --set data.path="$dir/gone.txt"
expect 1 "spillway.run_log $dir: Is a directory" "or that is a folder" train "$c" $none --set spillway.run_log="$dir" --set data.path="$dir/gone.txt"
expect 1 "--trace $dir/gone/t.json" "a trace in a folder that is not there" train "$c" $none --trace "$dir/gone/t.json"
check "is said before the first step" test ! -s "$dir/out"
expect 1 "--trace $dir" "a trace that is a folder" train "$c" $none --trace "$dir"
expect 1 "--trace /proc/t.json: " "a trace where files cannot be made, whoever asks" train "$c" $none --trace /proc/t.json
check "is said before the first step" test ! -s "$dir/out"
expect 1 "-o $dir/gone/aio.json" "a tuner's file in a folder that is not there" tune "$dir/swap" --seconds 5 --size 256MiB -o "$dir/gone/aio.json"
check "is said before the first measurement" test ! -s "$dir/out"
check "a checkpoint_dir whose parents are not there is made" run train "$c" --set spillway.checkpoint_dir="$dir/x/y z/ü"
check "with its checkpoint" test -d "$dir/x/y z/ü/step-2"

# A second run would remove the first one's checkpoints: it is refused before any work, and a killed one is in nobody's way.
"$spw" train "$c" --set spillway.steps=1000000 --set spillway.checkpoint_dir="$dir/one" >/dev/null 2>&1 &
pid=$!
comes test -e "$dir/one/.spillway.lock"
expect 1 "process $pid, which holds $dir/one/.spillway.lock" "a checkpoint_dir that another run saves to" train "$c" --set spillway.checkpoint_dir="$dir/one"
check "is said before the first step" test ! -s "$dir/out"
kill -KILL $pid
{ wait $pid; } 2>/dev/null
echo "4711 elsewhere" >"$dir/one/.spillway.lock"
exec 9<"$dir/one/.spillway.lock"
flock 9
expect 1 "process 4711 of host elsewhere, which holds" "one of another host" train "$c" --set spillway.checkpoint_dir="$dir/one"
exec 9<&-
check "a run after a killed one" run train "$c" --set spillway.checkpoint_dir="$dir/one"
check "leaves its checkpoint alone" test "$(ls -A "$dir/one")" = step-2
expect 1 "nothing matches" "a run without data" train "$c" --set spillway.checkpoint_dir="$dir/two" --set data.path="$dir/gone.txt"
check "leaves no folder" test ! -e "$dir/two"

# What stands where a folder should be is called what it is.
expect 1 "folder $c cannot be written to" "a swap path that is a file" train "$c" $none --set zero_optimization.offload_param.nvme_path="$c"
check "is not called missing" test -n "$(grep 'Not a directory' "$dir/err")"
[ -d /proc/self ] && expect 1 "folder /proc cannot be written to" "a swap path in which nothing can be made" train "$c" $none --set zero_optimization.offload_param.nvme_path=/proc
want="spillway.checkpoint_dir: creating folder /proc/x"
[ -w /proc ] || want="spillway.checkpoint_dir /proc/x: writing to /proc" # for who is not root
[ -d /proc/self ] && expect 1 "$want" "a checkpoint_dir that cannot be made" train "$c" --set spillway.checkpoint_dir=/proc/x
check "is said before the first step" test ! -s "$dir/out"
mkdir "$dir/none" && echo "<html>" >"$dir/none/model.safetensors" && echo "and more" >>"$dir/none/model.safetensors"
expect 1 "no complete checkpoint (step-<n>/spillway.json), and no config.json as a Hugging Face folder has" "a folder without config.json" generate "$dir/none" --prompt x
expect 1 "model.safetensors is not a safetensors file, or damaged" "a page in place of a file" inspect "$dir/none"
mkdir "$dir/peft" && echo '{"base_model_name_or_path": "owner/base"}' >"$dir/peft/adapter_config.json" && echo x >"$dir/peft/adapter_model.safetensors"
adapters="has adapter_model.safetensors (adapters of owner/base, as adapter_config.json says)"
for what in "generate --prompt x" "eval --data $dir/text.txt"; do
    expect 1 "$adapters, and no model: spillway export merges them" "adapters alone, to ${what%% *}" ${what%% *} "$dir/peft" ${what#* }
done
expect 2 "$adapters, and no model: spillway export merges them" "adapters alone, to train" train "$c" $none --set "model={\"path\":\"$dir/peft\"}"
expect 1 "$adapters, and no weights of that model: --model FOLDER names" "adapters of a model that is not here, to export" export "$dir/peft" --to "$dir/merged"
expect 1 "owner/base: there is no such folder, and no model of that name in the Hugging Face cache" "and with its name" export "$dir/peft" --to "$dir/merged" --model owner/base
cp "$dir/a/step-2/config.json" "$dir/peft"
expect 1 "$adapters, which is not read" "adapters with config.json, to generate" generate "$dir/peft" --prompt x
expect 3 "for the device, which is host memory on the cpu" "a batch too large" plan "$c" --no-measure --set train_micro_batch_size_per_gpu=100000 --set data.seq_length=32 --set model.n_embd=4096
check "says what makes it smaller" grep -q "fewer sequences in a micro-batch (train_micro_batch_size_per_gpu" "$dir/err"
check "and what does" grep -q "^it fits with: --set train_micro_batch_size_per_gpu=.* --set spillway.micro_batches_per_pass=1" "$dir/out"

# Options: a name that is unknown, not a value that is missing; numbers in full.
expect 2 "unknown option --nope" "tune --nope" tune --nope
expect 2 "--size takes at least 256MiB, not 1" "tune --size" tune --size 1 "$dir"
expect 2 "a value is an argument of its own: --set a=b" "--set=a=b" train "$c" --set=a=b
expect 2 "a value is an argument of its own: --tokens 3" "--tokens=3" generate "$c" --tokens=3
expect 2 "a value is an argument of its own: -n 2" "-n2" train "$c" -n2
expect 2 "unknown option --size" "bench adam --size" bench adam --size
expect 2 "unknown option x" "bench adam x" bench adam x
expect 2 "--codes int2 is not int8, int4, published or none" "codes of two bits" generate "$dir/a" --prompt x --codes int2
expect 2 "unknown option --nope" "bench io --nope" bench io --nope
expect 2 "bench io: --block cannot be 3" "which benchmark it is" bench io "$dir" --block 3
expect 2 "not 0" "no rank" train "$c" $none -n 0
expect 2 "not 4294967297" "more ranks than a word of 32 bits" train "$c" $none -n 4294967297
check "help config WORD" run help config NVME_path
check "shows the keys that say it" test "$(grep -c . "$dir/out")" -eq 3 -a "$(grep -c 'offload_[a-z]*\.nvme_path: ' "$dir/out")" -eq 2
named() { # FILE: it names all types of models that the help for model_type does
    local type types
    types=$("$spw" help config model_type | sed -n 's/.*(model_type \([^)]*\)).*/\1/p' | sed 's/ or /, /' | tr -d ' ' | tr ',' '\n')
    [ "$(echo "$types" | wc -l)" -ge 47 ] || return 1
    for type in $types; do grep -q "\`$type\`" "$1" || { echo "no $type" && return 1; }; done
}
check "docs/models.md has all types of models" named docs/models.md
# What the pages say is there: files and headings that links lead to, keys, options.
pages=(README.md docs/*.md)
led() { # each link of a page that names no host: the file is there, and has the heading
    local page link file
    for page in "${pages[@]}"; do
        for link in $(grep -o '](\([^)]*\))' "$page" | sed 's/^](//; s/)$//' | grep -v '^https\?:'); do
            file=$page
            case $link in \#*) ;; *) file=$(dirname "$page")/${link%%#*} ;; esac
            [ -e "$file" ] || { echo "$page: $link" && return 1; }
            case $link in *\#*) sed -n 's/^##* //p' "$file" | tr 'A-Z ' 'a-z-' | tr -cd 'a-z0-9_\n-' | grep -qx -- "${link#*#}" || { echo "$page: $link" && return 1; } ;; esac
        done
    done
    return 0
}
check "links of the pages lead somewhere" led
keyed() { # each spillway.KEY of a page is a key, or a part of the library's
    local key
    "$spw" help config | sed -n 's/^  \(spillway\.[a-z0-9_.]*\).*/\1/p' >"$dir/keys"
    grep -oh 'spillway\.[a-z][a-z0-9_]*[a-z0-9]' "${pages[@]}" | sort -u >"$dir/said-keys"
    [ "$(wc -l <"$dir/said-keys")" -gt 40 ] || return 1
    while read -r key; do
        case $key in spillway.h | spillway.json) continue ;; esac
        grep -q "^$key\(\.\|$\)" "$dir/keys" || { echo "no key $key" && return 1; }
    done <"$dir/said-keys"
}
check "the pages name keys that there are" keyed
optioned() { # each option of a command that a page shows is in the command's help
    local command line option
    cat "${pages[@]}" | sed 's/ # .*//' | sed -e ':a' -e '/\\$/N; s/\\\n//; ta' | grep -o '\./spillway [a-z].*' | sed 's/`.*//' >"$dir/shown"
    [ "$(wc -l <"$dir/shown")" -gt 40 ] || return 1
    while read -r _ command line; do
        "$spw" help "$command" >"$dir/help" || { echo "no command $command" && return 1; }
        for option in $(echo "$line" | grep -o -- '\(^\| \)--[a-z-]*'); do
            grep -q -- "$option\b" "$dir/help" || { echo "$command $option" && return 1; }
        done
    done <"$dir/shown"
}
check "and options that their commands have" optioned
expect 2 "no configuration key says xyzzy" "help config of no key" help config xyzzy
expect 2 "there is no command xyzzy" "help of no command" help xyzzy
check "says what shows them all" said "spillway help shows how it is used"
check "help help" run help help
check "is that of the program" test "$(head -n 1 "$dir/out")" = "$("$spw" help | head -n 1)"
check "help --help" run help --help
check "help bench adam" run help bench adam
check "is that of adam alone" test "$(grep -c '^spillway bench' "$dir/out")" -eq 1 -a -n "$(grep 'bench adam' "$dir/out")"
check "help bench" run help bench
check "is that of all" test "$(grep -c '^spillway bench' "$dir/out")" -eq 5
expect 2 "no benchmark foo" "help bench foo" help bench foo

# A variable that is not set is not the root of the file system.
expect 2 "doctor: a path is empty" "doctor of an empty path" doctor ""
expect 2 "bench io: a path is empty" "bench io of one" bench io "$dir" "" --smoke
expect 2 "tune: a path is empty" "tune of one" tune "" --seconds 5
for command in train plan inspect export eval generate tokenize plot; do
    expect 2 "spillway $command: the name of a file or folder is empty" "$command of one" $command ""
done
expect 2 "train: --resume is empty: a variable that is not set?" "no checkpoint to go on from" train "$c" $none --resume ""
expect 2 "export: --model is empty" "a model's folder without a name" export "$dir/a" --to "$dir/x" --model ""
expect 2 "eval: --data is empty" "data without one" eval "$dir/a" --data ""
expect 1 "-o: the name of the file is empty" "tune into a file without a name, before it measures" tune "$dir" --seconds 5 -o ""
expect 1 "--trace: the name of the file is empty" "and a timeline" train examples/demo.json --set spillway.checkpoint_dir= --set data.path=README.md --trace ""
mkdir "$dir/b"$'\351'
expect 1 "is not UTF-8, and a configuration cannot name it" "tune a folder that a configuration cannot name" tune "$dir/b"$'\351' --seconds 5 -o "$dir/t.json"
# A folder for a file, a file for its folder, a home folder that the shell did not fill in.
expect 2 "$dir/a is not a regular file but a folder" "a folder in place of a configuration" train "$dir/a"
expect 1 "$dir/a/step-2/model.safetensors is a file: the folder is named here" "a file in place of its folder" generate "$dir/a/step-2/model.safetensors" --prompt x
at_home() { HOME=$dir run "$@"; }
check "data in the home folder" at_home eval "$dir/a" --data '~/te*.txt' --batches 1
# What a finished file takes the place of is a file.
mkfifo "$dir/pipe"
echo '{"op": "copy", "size": 4096, "gb_s": 1}' >"$dir/rows.json"
check "a row is drawn" run plot "$dir/rows.json" -o "$dir/rows.svg"
expect 1 "-o $dir/pipe is not a regular file" "a picture in place of a pipe" plot "$dir/rows.json" -o "$dir/pipe"
expect 1 "-o $dir/pipe is not a regular file" "settings" tune "$dir" --seconds 5 -o "$dir/pipe"
expect 1 "-o $dir/pipe is not a regular file" "tokens" tokenize "$c" --tokenizer tests/vectors/tok_gpt2.json -o "$dir/pipe"
check "which it still is" test -p "$dir/pipe"
ln -s rows.svg "$dir/link.svg"
expect 1 "-o $dir/link.svg is a link" "a picture in place of a link" plot "$dir/rows.json" -o "$dir/link.svg"
# doctor: a folder that is missing is one mistake, beside what this machine has not.
misses() { grep -c 'missing  \(io_uring\|threads\|path\)' "$dir/out"; }
run doctor "$dir/swap"
here=$(misses)
run doctor "$dir/gone" "$dir/swap"
check "doctor of a missing folder ends with 1" test $? -eq 1
check "and does not blame the transfers" test "$(misses)" -eq $((here + 1))

# JSON: prompts that are not UTF-8, sums over all purposes.
check "a prompt that is not UTF-8" run generate "$dir/a" --prompt $'h\xff' --tokens 2 --json
check "is there, with U+FFFD" grep -q $'"prompt":"h\xef\xbf\xbd"' "$dir/out"
cp -r "$dir/a" "$dir/"$'b\xffd'
check "a checkpoint whose name is not" run eval "$dir/"$'b\xffd' --data "$dir/text.txt" --batches 1 --json
check "is there, too" grep -qF $'b\xef\xbf\xbdd/step-' "$dir/out"
printf 'one\r\n\r\ntwo' >"$dir/prompts.txt"
check "prompts with lines from Windows" run generate "$dir/a" --prompts "$dir/prompts.txt" --tokens 2 --json
check "are these" test "$(grep -o '"prompt":"[^"]*"' "$dir/out" | tr -d '\n')" = '"prompt":"one""prompt":"two"'
check "prompts that cannot be read" test "$("$spw" generate "$dir/a" --prompts - 2>&1 <"$dir")" = "spillway: --prompts -: reading stdin: Is a directory"
echo '{"text": "a line"}' >"$dir/line.jsonl"
XDG_CACHE_HOME=/proc/none expect 1 'which is below $XDG_CACHE_HOME or $HOME where nothing says it: creating folder /proc/none' "tokens that have no place, of a command without the key" eval "$dir/a" --data "$dir/line.jsonl"
check "plan with gradients on nvme" run plan "$c" --no-measure --json --set spillway.gradients='"nvme"' --set gradient_clipping=1
check "the sum of the purposes is the total" python3 - "$dir/out" <<'PY'
import json, sys
p = json.load(open(sys.argv[1]))
grads = p["bytes"]["gradients"]["nvme"]
sys.exit(0 if grads > 0 and all(sum(x[t] for x in p["bytes"].values()) == p["total"][t] for t in ("host", "nvme")) else 1)
PY

# A disk that is too small: what it had free, not what the attempt left.
truncate -s 96M "$dir/disk.img" && mkdir "$dir/small"
if mkfs.ext4 -q "$dir/disk.img" 2>/dev/null && mount -o loop "$dir/disk.img" "$dir/small" 2>/dev/null; then
    mounted=$dir/small
    expect 1 "needs 2.00 GiB" "a small disk" bench io "$dir/small"
    check "shows what is free" sh -c "! grep -q ' 0 B free' '$dir/err'"
else
    echo "ok $((n += 1)) - a small disk # SKIP mounting is not permitted here"
fi
echo "1..$n"
