#!/bin/bash
# Weights kept in the codes that their folder has: runs of any number of ranks, checkpoints, generation, plans of a config.json alone. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-published-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
kimi=tests/vectors/scaled/kimi_k25
mkdir "$dir/swap" "$dir/bare"
for i in $(seq 500); do printf '%s' " !\$(" '"&#' "$((i % 7 > 3))" | tr 01 '#%'; done >"$dir/text" # of a vocabulary of 41
cat >"$dir/c.json" <<EOF2
{"model": {"path": "$kimi"}, "data": {"path": ["$dir/text"], "seq_length": 16, "tokenizer": "bytes"}, "train_batch_size": 12, "train_micro_batch_size_per_gpu": 1,
 "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
 "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$dir/swap"}, "offload_optimizer": {"device": "cpu"}},
 "spillway": {"steps": 4, "lora": {"rank": 4, "alpha": 8, "targets": ["*_proj"]}, "frozen_codes": "published", "checkpoint_dir": "", "device": "cpu", "chunk_elems": 4096}}
EOF2
refuses() { local says=$1; shift; ! run "$@" && grep -q "$says" "$dir/err"; }
losses() { grep -o '"loss":[0-9.e-]*' "$dir/log" >"$dir/$1"; }
same() { [ "$(wc -l <"$dir/$1")" -eq "$3" ] && cmp -s "$dir/$1" "$dir/$2"; }

for ranks in 1 2 3; do
    for codes in none published; do
        rm -f "$dir/log"
        check "$ranks ranks, codes $codes" run train "$dir/c.json" -n $ranks --quiet --set spillway.run_log="$dir/log" --set gradient_accumulation_steps=$((12 / ranks)) \
            --set spillway.frozen_codes=$codes --set spillway.checkpoint_dir="$dir/$codes-$ranks"
        losses $codes-$ranks.losses
    done
    check "give the same losses" same published-$ranks.losses none-$ranks.losses 4
    for file in adapter_model.safetensors optimizer-00001-of-00001.safetensors model.safetensors; do
        check "and $file" cmp -s "$dir/published-$ranks/step-4/$file" "$dir/none-$ranks/step-4/$file"
    done
done

# A checkpoint's numbers are codes again, and the other way round.
run train "$dir/c.json" --quiet --set spillway.run_log="$dir/whole" --set spillway.steps=6
for from in none-1 published-1; do
    codes=$([ $from = none-1 ] && echo published || echo none)
    rm -f "$dir/log"
    check "$from goes on with $codes" run train "$dir/c.json" --quiet --resume-anyway --resume "$dir/$from/step-4" --set spillway.run_log="$dir/log" --set spillway.steps=6 --set spillway.frozen_codes=$codes
    losses on.losses
    grep -o '"loss":[0-9.e-]*' "$dir/whole" | tail -2 >"$dir/end.losses"
    check "with the same losses" same on.losses end.losses 2
done
check "its model's folder alone is enough for adapters" run train "$dir/c.json" --quiet --set spillway.checkpoint_base=false --set spillway.checkpoint_dir="$dir/light"
check "of which one goes on with numbers" run train "$dir/c.json" --quiet --resume-anyway --resume "$dir/light/step-4" --set spillway.steps=5 --set spillway.frozen_codes=none

# 8-bit floats beside experts of 4 bits, each kept as it is.
mixed=tests/vectors/scaled/qwen3_fp4
for codes in none published; do
    rm -f "$dir/log"
    check "two forms on 2 ranks, codes $codes" run train "$dir/c.json" -n 2 --quiet --set model.path="$mixed" --set spillway.run_log="$dir/log" --set gradient_accumulation_steps=6 \
        --set spillway.frozen_codes=$codes --set spillway.checkpoint_dir="$dir/mixed-$codes"
    losses mixed-$codes.losses
done
check "give the same losses" same mixed-published.losses mixed-none.losses 4
check "and model.safetensors" cmp -s "$dir/mixed-published/step-4/model.safetensors" "$dir/mixed-none/step-4/model.safetensors"

# Strips of gpt-oss' experts, whose scales are columns'.
oss=tests/vectors/families/gpt_oss_mxfp4
for ranks in 1 3; do
    for codes in none published; do
        rm -f "$dir/log"
        check "strips on $ranks ranks, codes $codes" run train "$dir/c.json" -n $ranks --quiet --set model.path="$oss" --set spillway.run_log="$dir/log" \
            --set gradient_accumulation_steps=$((12 / ranks)) --set spillway.frozen_codes=$codes --set spillway.checkpoint_dir="$dir/oss-$codes-$ranks"
        losses oss-$codes.losses
    done
    check "give the same losses" same oss-published.losses oss-none.losses 4
    check "and model.safetensors" cmp -s "$dir/oss-published-$ranks/step-4/model.safetensors" "$dir/oss-none-$ranks/step-4/model.safetensors"
done
rm -f "$dir/log"
check "which goes on with codes" run train "$dir/c.json" --quiet --set model.path="$oss" --resume-anyway --resume "$dir/oss-none-1/step-4" --set spillway.run_log="$dir/log" --set spillway.steps=5
run generate "$oss" --ids --prompt '1 2 3' --tokens 12 --temperature 0 --codes none
cp "$dir/out" "$dir/said"
check "generate keeps strips" run generate "$oss" --ids --prompt '1 2 3' --tokens 12 --temperature 0
check "and says the same" cmp -s "$dir/out" "$dir/said"

run generate "$kimi" --ids --prompt '1 2 3' --tokens 12 --temperature 0 --codes none
cp "$dir/out" "$dir/said"
check "generate keeps codes" run generate "$kimi" --ids --prompt '1 2 3' --tokens 12 --temperature 0
check "and says the same" cmp -s "$dir/out" "$dir/said"
check "a checkpoint's too" run generate "$dir/published-1" --ids --prompt '1 2 3' --tokens 4 --temperature 0

# On the emulated cuda device, where codes come over a link and are decoded behind it.
if [ -f "$build/emulated/spillway-cuda.so" ]; then
    SPW_CUDA_PLUGIN=$(realpath "$build/emulated/spillway-cuda.so")
    export SPW_CUDA_PLUGIN
    for codes in none published; do
        rm -f "$dir/log"
        check "on a device apart, codes $codes" run train "$dir/c.json" --quiet --set spillway.device=cuda \
            --set spillway.frozen_codes=$codes --set spillway.run_log="$dir/log"
        losses cuda-$codes.losses
    done
    check "give the same losses" same cuda-published.losses cuda-none.losses 4
    for codes in none published; do
        rm -f "$dir/log"
        check "strips there, codes $codes" run train "$dir/c.json" --quiet --set spillway.device=cuda --set model.path="$oss" \
            --set spillway.frozen_codes=$codes --set spillway.run_log="$dir/log"
        losses cuda-$codes.losses
    done
    check "give the same losses" same cuda-published.losses cuda-none.losses 4
    unset SPW_CUDA_PLUGIN
else
    skip "codes on a device apart" "no emulated device here"
fi

# As published folders say what is left out, by expressions; routers are numbers without a word.
sed 's/"lm_head"/"lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\\\.(gate|up|gate_up|down)_proj.*"/' "$kimi/config.json" >"$dir/bare/config.json"
plans_codes() { rm -f "$dir/$2"; run plan "$dir/c.json" --gpu rtx4090 --set spillway.device=cuda --set model.path="$1" && grep spillway.frozen_codes "$dir/out" >"$dir/$2"; }
plans_codes "$kimi" with
check "a plan by config.json alone" plans_codes "$dir/bare" alone
check "says what one by the tensors does" same alone with 1
check "which is some" grep -q "4 bits, those that model.path has" "$dir/with"
cp "$mixed/config.json" "$dir/bare/config.json"
plans_codes "$mixed" with && plans_codes "$dir/bare" alone
check "of two forms too" same alone with 1
check "which it names" grep -q "codes of 8 and 4 bits, those" "$dir/with"
cp "$oss/config.json" "$dir/bare/config.json"
plans_codes "$oss" with && plans_codes "$dir/bare" alone
check "of strips too" same alone with 1
check "a folder without codes is refused" refuses "has no matrices as codes" train "$dir/c.json" --set model.path=tests/vectors/families/llama
echo "1..$n"
