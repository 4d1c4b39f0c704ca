#!/bin/bash
# What spillway plan --gpu predicts of a step on GPUs that are not here, over what it took on them (docs/performance.md, numbers of calls there):
# an H100 and H200s, 16 processors that update 5.5 G parameters a second. Computing is estimated by data sheets alone, nothing is measured. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
. tests/gpu_train.sh "$build/spillway" "$PWD/README.md"
. tests/lib_tap.sh
# took GPU MILLISECONDS WHICH LABEL SETTINGS...: of $name; WHICH: of a step that clips (clipped_s) or not (step_s).
took() {
    local gpu=$1 measured=$2 which=$3 label=$4
    shift 4
    run plan "$dir/$name.json" --json --gpu "$gpu" --rate optimizer=5.5 --set data.format=text --set data.tokenizer=bytes \
        --set spillway.host_memory=118GiB --set spillway.optimizer_threads=16 "$@"
    ratio=$(python3 -c 'import json, sys; p = json.load(open(sys.argv[1])); print("%.2f" % (1e3 * p[sys.argv[2]] / float(sys.argv[3])))' "$dir/out" "$which" "$measured" 2>>"$dir/err")
    check "$label, $gpu: ${ratio:-?} of $measured ms" awk -v r="${ratio:-0}" 'BEGIN { exit !(r > 0.75 && r < 1.25) }'
}
# All state on the card: calls 8 and 7.
model gpt2-124M 768 12 12 1024 32 2
took h100 120.2 step_s "GPT-2 124M"
took h200 112.9 step_s "GPT-2 124M"
model gpt2-774M 1280 36 20 1024 16 2
took h100 337.4 step_s "GPT-2 774M"
took h200 313.3 step_s "GPT-2 774M"
model gpt2-1.5B 1600 48 25 1024 16 2
took h100 641.0 step_s "GPT-2 1.5B"
took h200 607.3 step_s "GPT-2 1.5B"
model llama-1.1B 2048 22 32 2048 8 2
took h100 457.1 step_s "Llama 1.1B"
took h200 433.9 step_s "Llama 1.1B"
model llama-1.1B-64k 2048 22 16 65536 1 1
took h100 4256.7 step_s "Llama 1.1B, one sequence of 65536"
took h200 3948.7 step_s "Llama 1.1B, one sequence of 65536" # call 5
# Records, or all state, in host memory: call 9, and of updates a step late and of steps that do not clip call 9 and 7.
model gpt2-1.5B 1600 48 25 1024 16 4
took h200 1315.3 clipped_s "GPT-2 1.5B, records in host memory" --set zero_optimization="$records"
model llama-7B 4096 36 32 2048 16 4
took h200 11637 step_s "Llama 6.75B, 131072 tokens, 76 GiB of the card" --set zero_optimization="$host" --set spillway.device_memory=76GiB --set gradient_clipping=1e9
model llama-7B 4096 36 32 2048 16 1
took h200 2861 clipped_s "Llama 6.75B, 32768 tokens" --set zero_optimization="$host"
took h200 2701 clipped_s "Llama 6.75B, half of the records on the card" --set zero_optimization="$host" --set zero_optimization.offload_optimizer.ratio=0.5
took h200 2391 step_s "Llama 6.75B, updates a step late" --set zero_optimization="$host" --set spillway.delayed_update=1
echo "1..$n"
