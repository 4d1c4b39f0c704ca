#!/bin/bash
# Whole training runs on a GPU, as the kit (gpu_kit.sh) brings them there:
#   curves   GPT-2 124M from one seed in fp32 on the cpu device and on cuda, 20 losses within 1e-4; bf16 beside them
#   places   the same model in bf16 with its state on the device, in host memory, on nvme, gradients too, and mixed: losses and norms to the last digit;
#            updates a step late (spillway.delayed_update) with all, or records, in host memory and on nvme; in tiles of tokens (spillway.tile_tokens)
#            and with embeddings in pieces (spillway.tile_vocab)
#   kinds    the same model trained by Muon and on preferences, in bf16, with its state on the device, in host memory and on nvme: losses and norms to the last
#            digit; the first loss of preferences is log 2
#   speed    all state on the device: utilisation of the model's operations (MFU) for GPT-2 124M, 774M, 1.5B and a Llama of 1.1 B, this also with one sequence of 65536 tokens
#   offload  GPT-2 1.5B with records in host memory, where every step clips and where none does, beside all of it on the device, same micro-batches
#   large    6.8 B parameters (81 GB of state and 27 GB of gradients in host memory): with 76 GiB of the card, as of one of 80 GB, and 131072 tokens a step; with
#            all of it and 32768 tokens, where every step clips, all state in host memory, as much of it on the card as is chosen (spillway.fill_device), and
#            with updates a step late; and where none clips (12 steps with nearly all of the host's memory, for logs, and a rate with which gradients change as
#            late in a training)
#   profile  where a step's time goes, by kernel (Nsight Compute's ncu): four layers of GPT-2 1.5B's and of 124M's
# Times are medians of the steps from the fourth on; of runs of four, which have long steps, from the second on. Exits 1 where a comparison fails.
# usage: train.sh [--small] PROGRAM DATA PHASE...    --small: shapes for the emulated device; DATA: tokens, below 512 then
set -u
small=
[ "${1:-}" = --small ] && { small=1; shift; }
spw=$1 data=$2
shift 2
dir=$(mktemp -d "${SPW_KIT_DIR:-${TMPDIR:-/tmp}}/spw-gpu-XXXXXX")
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/swap"
export XDG_CACHE_HOME=$dir/cache
failed=0
fail() { echo "FAILED: $*"; failed=1; }

# model NAME WIDTH LAYERS HEADS POSITIONS MICRO_BATCH ACCUMULATION: its configuration is $dir/NAME.json; 128 wide heads: a Llama.
model() {
    name=$1 width=$2 layers=$3 heads=$4 T=$5 micro=$6 acc=$7 vocab=50257
    [ -n "$small" ] && { width=64 layers=2 heads=2 T=32 micro=2 vocab=512; }
    case $name in
    llama*) what="\"model_type\": \"llama\", \"hidden_size\": $width, \"intermediate_size\": $((width * 11 / 4 / 64 * 64)), \"num_hidden_layers\": $layers,
            \"num_attention_heads\": $heads, \"num_key_value_heads\": $(((heads + 7) / 8)), \"max_position_embeddings\": $T, \"tie_word_embeddings\": false" ;;
    *) what="\"model_type\": \"gpt2\", \"n_embd\": $width, \"n_layer\": $layers, \"n_head\": $heads, \"n_positions\": $T" ;;
    esac
    cat >"$dir/$name.json" <<JSON
{ "model": {$what, "vocab_size": $vocab}, "data": {"path": ["$data"], "seq_length": $T},
  "train_micro_batch_size_per_gpu": $micro, "gradient_accumulation_steps": $acc, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 3},
  "spillway": {"seed": 1, "device": "cuda", "fill_device": "never", "eval_interval": 0, "checkpoint_dir": ""} }
JSON
}
# run NAME LABEL STEPS SETTINGS...: its log is $dir/LABEL.log. What it says at its end is shown where it fails.
run() {
    name=$1 label=$2 steps=$3
    shift 3
    "$spw" train "$dir/$name.json" --set spillway.steps="$steps" --set spillway.run_log="$dir/$label.log" "$@" >"$dir/$label.out" 2>&1 && return
    tail -n 5 "$dir/$label.out"
    fail "$label"
    return 1
}
host='{"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}'
records='{"stage": 2, "offload_optimizer": {"device": "cpu"}}'
nvme="{\"stage\": 3, \"offload_param\": {\"device\": \"nvme\", \"nvme_path\": \"$dir/swap\"}, \"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": \"$dir/swap\"}}"
losses() { sed -n 's/.*"step":\([0-9]*\),"loss":\([^,]*\),"grad_norm":\([^,]*\).*/\1 \2 \3/p' "$dir/$1.log"; }
field() { sed -n "s/.*\"$2\":\\([-0-9.e+]*\\).*/\\1/p" "$dir/$1.log"; }
median() { sort -g | awk '{ v[NR] = $1 } END { print NR ? v[int((NR + 1) / 2)] : 0 }'; }
late() { grep '"step":' "$dir/$1.log" | tail -n +$(($(grep -c '"step":' "$dir/$1.log") > 4 ? 4 : 2)) | sed -n "s/.*\"$2\":\\([-0-9.e+]*\\).*/\\1/p" | median; }
# show LABEL: a line of what a run reached, and the closing lines that say where the time went.
show() {
    awk -v label="$1" -v s="$(late "$1" step_s)" -v tokens="$(late "$1" tokens)" -v flops="$(field "$1" model_flops | head -n 1)" \
        -v peak="$(field "$1" peak_flops | head -n 1)" -v eta="$(late "$1" eta)" 'BEGIN {
        printf "%-28s %9.1f ms a step, %8.0f tokens/s, %7.1f TFLOP/s of the model", label, s * 1e3, tokens / s, flops / s * 1e-12
        if (peak > 0) printf ", MFU %.1f%% of %.0f TFLOP/s", 100 * flops / s / peak, peak * 1e-12
        printf ", eta %.2f\n", eta }'
    echo "  seconds of each  " $(grep '"step":' "$dir/$1.log" | sed -n 's/.*"step_s":\([^,]*\).*/\1/p' | cut -c1-6)
    grep -E '^spillway: warning|^  (updates|spillway.recompute|spillway.micro_batches_per_pass|step time|busy|before|h2d|d2h|nvme|peak memory|of the device|total)|steps in' "$dir/$1.out" | grep -Ev ' 0 B +0 B +0.00$'
}
curves() {
    model gpt2-124M 768 12 12 128 4 1
    run gpt2-124M cpu 20 --set spillway.device=cpu --set bf16.enabled=false --set zero_optimization="$host" &&
        run gpt2-124M fp32 20 --set bf16.enabled=false && run gpt2-124M bf16 20 || return
    echo "step, loss on cpu in fp32, on cuda in fp32, in bf16"
    for label in cpu fp32 bf16; do losses $label | cut -d' ' -f1,2 >"$dir/$label.losses"; done
    paste -d' ' "$dir/cpu.losses" "$dir/fp32.losses" "$dir/bf16.losses" | awk '{ print $1, $2, $4, $6 }
        { d = ($2 - $4) / $2; rows++ } d > 1e-4 || d < -1e-4 || $4 != $4 + 0 { bad = 1 } END { exit bad || rows != 20 }' ||
        fail "losses on the cpu device and on cuda differ by more than 1e-4"
}
places() {
    model gpt2-124M 768 12 12 512 4 2
    budget=2GiB
    [ -n "$small" ] && budget=auto
    run gpt2-124M device 6 && run gpt2-124M host 6 --set zero_optimization="$host" && run gpt2-124M records 6 --set zero_optimization="$records" &&
        run gpt2-124M nvme 6 --set zero_optimization="$nvme" && run gpt2-124M mixed 6 --set zero_optimization="$nvme" --set spillway.host_memory=$budget &&
        run gpt2-124M gradients 6 --set zero_optimization="$nvme" --set spillway.gradients=nvme &&
        run gpt2-124M part 6 --set zero_optimization="$host" --set zero_optimization.offload_optimizer.ratio=0.5 || return
    losses device >"$dir/want"
    cp "$dir/want" "$dir/device.losses"
    [ "$(wc -l <"$dir/want")" -eq 6 ] || fail "six steps were to be made"
    for label in host records nvme mixed gradients part; do
        losses $label | cmp -s - "$dir/want" && echo "state $label: losses and norms of state on the device, to the last digit" ||
            fail "state $label: other losses than with state on the device"
    done
    run gpt2-124M late 6 --set zero_optimization="$host" --set spillway.delayed_update=1 &&
        run gpt2-124M late-records 6 --set zero_optimization="$records" --set spillway.delayed_update=1 &&
        run gpt2-124M late-nvme 6 --set zero_optimization="$nvme" --set spillway.delayed_update=1 || return
    losses late >"$dir/late"
    cmp -s "$dir/late" "$dir/want" && fail "updates a step late: the losses of updates at once"
    for label in late-records late-nvme; do
        losses $label | cmp -s - "$dir/late" && echo "$label: losses and norms of all state in host memory, to the last digit" ||
            fail "$label: other losses than with all state in host memory"
    done
    cuts="tile_tokens=700 tile_vocab=16384"
    [ -n "$small" ] && cuts="tile_tokens=12 tile_vocab=128"
    for cut in $cuts; do
        run gpt2-124M cut 6 --set spillway.$cut &&
            run gpt2-124M cut-nvme 6 --set spillway.$cut --set spillway.recompute=always --set zero_optimization="$nvme" || return
        losses cut >"$dir/want"
        losses cut-nvme | cmp -s - "$dir/want" && echo "$cut: losses and norms of state on the device, to the last digit" ||
            fail "$cut: other losses on nvme than with state on the device"
        paste -d' ' "$dir/want" "$dir/device.losses" | awk '{ d = ($2 - $5) / $2; rows++ } d > 1e-2 || d < -1e-2 || $5 != $5 + 0 { bad = 1 } END { exit bad || rows != 6 }' ||
            fail "$cut: losses are not near those without"
    done
}
# kind LABEL SETTINGS...: in three places, the same losses.
kind() {
    local which=$1
    shift
    run gpt2-124M "$which" 6 "$@" && run gpt2-124M "$which, host" 6 "$@" --set zero_optimization="$host" &&
        run gpt2-124M "$which, nvme" 6 "$@" --set zero_optimization="$nvme" || return
    losses "$which" >"$dir/want"
    [ "$(wc -l <"$dir/want")" -eq 6 ] || fail "$which: six steps were to be made"
    for place in host nvme; do
        losses "$which, $place" | cmp -s - "$dir/want" && echo "$which, $place: losses and norms of state on the device, to the last digit" ||
            fail "$which, $place: other losses than with state on the device"
    done
}
kinds() {
    model gpt2-124M 768 12 12 512 4 2
    kind muon --set optimizer='{"type": "Muon", "params": {"lr": 1e-3}}'
    awk -v vocab="$vocab" 'function list(n,  i, s) { for (i = 0; i < n; i++) { x = (x * 1103 + 12345) % 65536; s = s (i ? "," : "[") x % vocab }; return s "]" }
        BEGIN { for (i = 0; i < 400; i++) print "{\"prompt\":" list(i % 5 + 2) ",\"chosen\":" list(i % 7 + 2) ",\"rejected\":" list(i % 3 + 2) "}" }' >"$dir/pairs.jsonl"
    kind dpo --set data.path="$dir/pairs.jsonl" --set spillway.preference.loss=dpo --set spillway.preference.beta=0.5
    losses dpo | awk 'NR == 1 && ($2 < 0.6931471805 || $2 > 0.6931471806) { bad = 1 } { last = $2 } END { exit bad || NR != 6 || !(last < 0.69) }' ||
        fail "dpo: losses do not fall from log 2"
}
speed() {
    model gpt2-124M 768 12 12 1024 32 2 && run gpt2-124M gpt2-124M 12 && show gpt2-124M
    model gpt2-774M 1280 36 20 1024 16 2 && run gpt2-774M gpt2-774M 10 && show gpt2-774M
    model gpt2-1.5B 1600 48 25 1024 16 2 && run gpt2-1.5B gpt2-1.5B 10 && show gpt2-1.5B
    model llama-1.1B 2048 22 32 2048 8 2 && run llama-1.1B llama-1.1B 10 && show llama-1.1B
    model llama-1.1B-64k 2048 22 16 65536 1 1 && run llama-1.1B-64k llama-1.1B-64k 5 && show llama-1.1B-64k
}
profile() {
    ncu=$(command -v ncu || ls /usr/local/cuda/bin/ncu 2>/dev/null)
    [ -n "$ncu" ] || { echo "no ncu here"; return; }
    while read -r name shape; do # shellcheck disable=SC2086
        model "$name" $shape
        "$ncu" --clock-control none --cache-control none --metrics gpu__time_duration.sum --csv --launch-skip 400 --launch-count 600 \
            "$spw" train "$dir/$name.json" --set spillway.steps=6 >"$dir/ncu.csv" 2>&1
        grep '^"[0-9]' "$dir/ncu.csv" | awk -F'","' -v name="$name" '{ t = $15; gsub(/[",]/, "", t); k = substr($5, 1, 60)
            if ($14 == "us") t *= 1000
            n[k]++; sum[k] += t; all += t; rows++ }
            END { printf "%s: %d launches, %.1f ms\n", name, rows, all * 1e-6
                  for (k in n) printf "%5.1f%% %5d times %9.1f us  %s\n", 100 * sum[k] / all, n[k], sum[k] / n[k] * 1e-3, k | "sort -rn | head -n 24"
                  close("sort -rn | head -n 24"); exit rows == 0 }' || { tail -n 3 "$dir/ncu.csv"; fail "$name: nothing was measured"; }
    done <<SHAPES
profile-1.5B 1600 4 25 1024 16 1
profile-124M 768 4 12 1024 32 1
SHAPES
}
calm=(--set gradient_clipping=1e9 --set optimizer.params.lr=1e-5)
offload() {
    model gpt2-1.5B 1600 48 25 1024 16 4
    for turn in 1 2; do
        run gpt2-1.5B "1.5B on the device, $turn" 6 && show "1.5B on the device, $turn"
        run gpt2-1.5B "1.5B, records in host memory, $turn" 6 --set zero_optimization="$records" && show "1.5B, records in host memory, $turn"
        run gpt2-1.5B "1.5B, no step clips, $turn" 8 --set zero_optimization="$records" "${calm[@]}" && show "1.5B, no step clips, $turn"
    done
    for turn in 1 2; do
        echo "$(late "1.5B, records in host memory, $turn" step_s) $(late "1.5B, no step clips, $turn" step_s) $(late "1.5B on the device, $turn" step_s)"
    done | awk '{ printf "offloaded over on the device, turn %d: %.3f, where no step clips %.3f\n", NR, $1 / $3, $2 / $3 }'
}
large() {
    local nearly_all
    nearly_all=$(awk '/^MemAvailable/ { print int($2 * 0.94 / 1024) "MiB" }' /proc/meminfo)
    model llama-7B 4096 36 32 2048 16 4
    run llama-7B "7B, 76 GiB of the card" 4 --set zero_optimization="$host" --set spillway.device_memory=76GiB --set gradient_clipping=1e9 && show "7B, 76 GiB of the card"
    model llama-7B 4096 36 32 2048 16 1
    run llama-7B "7B" 6 --set zero_optimization="$host" && show "7B"
    run llama-7B "7B, as is chosen" 6 --set zero_optimization="$host" --set spillway.fill_device=auto && show "7B, as is chosen"
    run llama-7B "7B, no step clips" 12 --set zero_optimization="$host" --set spillway.host_memory="$nearly_all" "${calm[@]}" && show "7B, no step clips"
    run llama-7B "7B, a step late" 6 --set zero_optimization="$host" --set spillway.delayed_update=1 && show "7B, a step late"
}
for phase in "$@"; do
    echo "== $phase"
    case $phase in
    curves | places | kinds | speed | profile | offload | large) $phase ;;
    *) fail "no phase $phase" ;;
    esac
done
[ "$0" != "${BASH_SOURCE[0]}" ] || exit $failed # test_predicted_gpus.sh takes the models
