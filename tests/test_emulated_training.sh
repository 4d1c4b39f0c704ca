#!/bin/bash
# Training and generating on the emulated cuda device, end to end, where nothing may be read before it was waited for. In fp32 the
# losses are those of the cpu device within 1e-4; on the device every placement has the same losses to the last digit, also with
# streams that work only when somebody waits for them. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
[ -f "$build/emulated/spillway-cuda.so" ] || { echo "1..1"; echo "ok 1 - emulated training # SKIP no C++ compiler when this was built"; exit 77; }
case $build in *asan | *tsan) echo "1..1"; echo "ok 1 - emulated training # SKIP minutes under a sanitizer; test_cuda_emulated runs the kernels there"; exit 77 ;; esac
plugin=$(realpath "$build/emulated/spillway-cuda.so")
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-emu-XXXXXX")
trap 'rm -rf "$dir"' EXIT
export OPENBLAS_NUM_THREADS=1
export SPW_EMULATE_GUARD=1 # the host has no way to device memory, as with a GPU
mkdir "$dir/swap"
awk 'BEGIN { for (i = 0; i < 2000; i++) printf "line %d says that %d times %d is %d\n", i, i, i % 7, i * (i % 7) }' >"$dir/text.txt"
gpt2='"model_type": "gpt2", "vocab_size": 256, "n_positions": 40, "n_embd": 48, "n_layer": 4, "n_head": 3'
llama='"model_type": "llama", "vocab_size": 256, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 6,
  "num_key_value_heads": 2, "max_position_embeddings": 40, "rms_norm_eps": 1e-5, "rope_theta": 10000.0'
. tests/lib_tap.sh
# Every number of a run that training decides: losses, norms, evaluations.
losses() { sed -n 'h; s/.*"eval_loss":\([^,}]*\).*/\1/p; g; s/.*"step":[0-9]*,"loss":\([^,]*\),"grad_norm":\([^,]*\).*/\1 \2/p' "$1"; }
# near LOG LOG WITHIN COUNT
near() {
    paste <(losses "$1" | tr ' ' '\n') <(losses "$2" | tr ' ' '\n') |
    awk -v within="$3" -v count="$4" '{ d = $1 - $2; rows++; if (!(d < within && d > -within)) { print "# number " rows ": " $1 " and " $2; bad = 1 } }
         END { exit bad || rows != count }'
}
same() { losses "$1" >"$dir/one"; losses "$2" >"$dir/two"; [ -s "$dir/one" ] && cmp -s "$dir/one" "$dir/two"; }
differs() { ! same "$@"; }
# The device's memory is its own, not taken from the host's, which is nearly all that was planned of it; both keep within the plan.
apart() {
    sed -n 's/.*"run":"closed".*"peak_bytes":{"device":\([-0-9]*\),"host":\([-0-9]*\),.*"plan_bytes":{"host":\([0-9]*\),"device":\([0-9]*\)}.*/\1 \2 \3 \4/p' "$1" |
        awk '{ print "# device " $1 " of " $4 ", host " $2 " of " $3; n++; if ($1 <= 0 || $1 > $4 || $2 < 0.9 * $3 || $2 > $3) bad = 1 } END { exit bad || n != 1 }'
}
# on PRECISION STREAMS COMMAND...: on the emulated device.
on() { SPW_CUDA_PLUGIN=$plugin SPW_CUDA_COMPUTE=$1 SPW_EMULATE_STREAMS=$2 "$spw" "${@:3}"; }
train() { on fp32 "$1" train "$dir/$family.json" --quiet --set spillway.device=cuda --set spillway.run_log="$dir/log" "${@:2}" >"$dir/out" 2>&1; }
# Where a record is 10 bytes an element, beside a weight of 2, gradients of 4 bytes take four tenths of that: there is no buffer.
one_place() {
    on fp32 "" plan "$dir/$family.json" --no-measure --json --set spillway.device=cuda "${all_there[@]}" | tr -d ' \n' |
        sed 's/.*"records":{"device":\([0-9]*\),.*"gradients":{"device":\([0-9]*\),.*/\1 \2/' | awk '{ exit !($1 > 0 && $2 * 10 == $1 * 4) }'
}
in_passes_of() { on fp32 "" plan "$dir/$family.json" --no-measure --set spillway.device=cuda "${all_there[@]}" | grep -Eq "^  spillway.micro_batches_per_pass +$1 "; }
# placed NAME STREAMS OVERRIDES...: the numbers of the first run on the device.
first=cuda
placed() {
    rm -f "$dir/log"
    train "$2" "${@:3}"
    check "$family, ${2:-early} streams, $1" same "$dir/$family.$first" "$dir/log"
}
all_there=(--set 'zero_optimization={"stage": 3}')
part_there=(--set 'zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}')
third=(--set zero_optimization.offload_optimizer.ratio=0.33)
nvme="{\"device\": \"nvme\", \"nvme_path\": \"$dir/swap\"}"
for family in gpt2 llama; do
    cat >"$dir/$family.json" <<JSON
{ "model": {${!family}},
  "data": {"path": ["$dir/text.txt"], "seq_length": 24, "seed": 1},
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": 3, "seed": 3, "device": "cpu", "fill_device": "never", "chunk_elems": 8192, "eval_interval": 2, "eval_batches": 2} }
JSON
    "$spw" train "$dir/$family.json" --quiet --set spillway.run_log="$dir/$family.cpu" >"$dir/out" 2>&1
    train "" --set spillway.run_log="$dir/$family.cuda"
    check "$family has the losses of the cpu device" near "$dir/$family.cpu" "$dir/$family.cuda" 1e-4 8
    on "" late train "$dir/$family.json" --quiet --set spillway.device=cuda --set spillway.run_log="$dir/$family.bf16" >"$dir/out" 2>&1
    "$spw" train "$dir/$family.json" --quiet --set spillway.fp8=true --set spillway.run_log="$dir/$family.fp8.cpu" >"$dir/out" 2>&1
    train "" --set spillway.fp8=true --set spillway.run_log="$dir/$family.fp8.fp32"
    check "$family in 8-bit floats has the losses of the cpu device" near "$dir/$family.fp8.cpu" "$dir/$family.fp8.fp32" 3e-3 8
    for streams in "" late; do
        on "" "$streams" train "$dir/$family.json" --quiet --set spillway.fp8=true --set spillway.device=cuda --set spillway.run_log="$dir/$family.fp8.$streams" "${all_there[@]}" >"$dir/out" 2>&1
    done
    check "$family in 8-bit floats from bf16 has about those" near "$dir/$family.fp8.cpu" "$dir/$family.fp8." 0.2 8
    check "$family in 8-bit floats, late streams: the same numbers" same "$dir/$family.fp8." "$dir/$family.fp8.late"
    check "$family in 8-bit floats, and not those of bf16" differs "$dir/$family.fp8." "$dir/$family.bf16"
    on "" late train "$dir/$family.json" --quiet --set spillway.device=cuda --set bf16.enabled=false --set fp16.enabled=true \
        --set spillway.run_log="$dir/$family.fp16" "${all_there[@]}" >"$dir/out" 2>&1
    check "$family, all of it on the device: its memory and the host's keep within the plan" apart "$dir/$family.fp16"
    check "$family, all of it on the device: a gradient has one place" one_place
    check "$family, all of it on the device: micro-batches come one by one" in_passes_of 1
    # In bf16 weights are used where they lie when all of them are there; updates wait for who still reads them.
    # Each family takes half of what is independent of its layers.
    [ $family = gpt2 ] && streams_of_bf16=("" late) codes=int8 || streams_of_bf16=(late) codes=int4
    for streams in "${streams_of_bf16[@]}"; do
        [ "$family$streams" = gpt2late ] && clipping=0 || clipping=1.0
        for place in host some there; do
            set -- --set gradient_clipping=$clipping --set spillway.chunk_elems=4096 --set spillway.chaos_seed=5 --set spillway.run_log="$dir/$place"
            [ $place = there ] && set -- "$@" "${all_there[@]}"
            [ $place = some ] && set -- "$@" "${third[@]}"
            on "" "$streams" train "$dir/$family.json" --set spillway.device=cuda "$@" >"$dir/out" 2>&1
        done
        check "$family in bf16, ${streams:-early} streams, clipping $clipping, some state on the device: the same numbers" same "$dir/host" "$dir/some"
        check "$family in bf16, ${streams:-early} streams, clipping $clipping, all state on the device: the same numbers" same "$dir/host" "$dir/there"
        check "$family, and nothing was gathered" grep -Eq '^  gathered units +0 B ' "$dir/out"
    done
    # Adapters beside weights that are stored as codes: decoded on the way, wherever they lie, to the numbers of the cpu device.
    adapted=(--set 'spillway.lora={"rank":2,"alpha":4,"targets":["'$([ $family = gpt2 ] && echo c_attn || echo q_proj)'"]}')
    "$spw" train "$dir/$family.json" --quiet --set spillway.run_log="$dir/coded.cpu" "${adapted[@]}" --set spillway.frozen_codes=$codes >"$dir/out" 2>&1
    on fp32 "" train "$dir/$family.json" --quiet --set spillway.device=cuda --set spillway.run_log="$dir/coded.cuda" \
        "${adapted[@]}" --set spillway.frozen_codes=$codes >"$dir/out" 2>&1
    check "$family with adapters beside $codes has the losses of the cpu device" near "$dir/coded.cpu" "$dir/coded.cuda" 1e-4 8
    for place in host there nvme; do
        set -- --set spillway.run_log="$dir/$place" --set spillway.frozen_codes=$codes --set spillway.chaos_seed=7 "${adapted[@]}"
        [ $place = there ] && set -- "$@" "${all_there[@]}"
        [ $place = nvme ] && set -- "$@" --set "zero_optimization.offload_param=$nvme" --set "zero_optimization.offload_optimizer=$nvme"
        on "" late train "$dir/$family.json" --set spillway.device=cuda "$@" >"$dir/out" 2>&1
    done
    check "$family in bf16 beside $codes, all state on the device: the same numbers" same "$dir/host" "$dir/there"
    check "$family in bf16 beside $codes, all of it on nvme: the same numbers" same "$dir/host" "$dir/nvme"
    sed -i 's/"grad_norm":[^,]*/"grad_norm":0/' "$dir/$family.cpu" "$dir/$family.bf16" "$dir/$family.fp16"
    check "$family in bf16 has losses near them" near "$dir/$family.cpu" "$dir/$family.bf16" 2e-2 8
    check "$family in fp16, all on the device, has losses nearer" near "$dir/$family.cpu" "$dir/$family.fp16" 5e-3 8

    # The smallest device: every unit comes to lie where another one was just read.
    train "" --set spillway.device_memory=4096 --set spillway.activations=host
    least=$(sed -n 's/.*need at least .*(\([0-9]*\) bytes).*/\1/p' "$dir/out")
    check "$family, the least device memory is named" test -n "$least"
    placed "the least device memory, everything on nvme" "" --set spillway.activations=nvme --set spillway.device_memory="$least" \
        --set zero_optimization.offload_param="$nvme" --set zero_optimization.offload_optimizer="$nvme"
    placed "everything in host memory" late
    placed "all state on the device" late "${all_there[@]}"
    placed "all state on the device" "" "${all_there[@]}" --set spillway.chunk_elems=4096 --set spillway.chaos_seed=3
    check "$family, and nothing crosses the link" grep -Eq '^  d2h +0 B ' "$dir/out"
    placed "weights on the device, records in host memory" late "${part_there[@]}"
    placed "the host updates a third, the first units' state is on the device" late "${third[@]}" --set spillway.chaos_seed=6
    check "$family, and the plan says so" grep -Eq '^  updates +[5-9][0-9] % on the device ' <(on fp32 "" plan "$dir/$family.json" --no-measure --set spillway.device=cuda "${third[@]}")
    placed "the same on nvme, small chunks" "" "${third[@]}" --set spillway.chunk_elems=4096 \
        --set zero_optimization.offload_param="$nvme" --set zero_optimization.offload_optimizer.device=nvme --set zero_optimization.offload_optimizer.nvme_path="$dir/swap"
    placed "weights and records on nvme" late --set zero_optimization.offload_param="$nvme" --set zero_optimization.offload_optimizer="$nvme"
    placed "the least device memory, activations in host memory" late --set spillway.activations=host --set spillway.device_memory="$least"
    placed "the least device memory, everything on nvme" late --set spillway.activations=nvme --set spillway.device_memory="$least" \
        --set zero_optimization.offload_param="$nvme" --set zero_optimization.offload_optimizer="$nvme"
    placed "gradients on nvme too" late --set zero_optimization.offload_param="$nvme" --set zero_optimization.offload_optimizer="$nvme" \
        --set spillway.gradients=nvme --set spillway.chaos_seed=8
    first=passes # a tied matrix has its gradients added up in another order
    train "" --set spillway.run_log="$dir/$family.passes" --set spillway.micro_batches_per_pass=1
    placed "a pass for each micro-batch, gradients added up in host memory" late --set spillway.micro_batches_per_pass=1
    first=cuda
    placed "no prefetching, small chunks" late --set spillway.prefetch=false --set spillway.chunk_elems=4096

    # Half a run, and the rest from its checkpoint.
    rm -f "$dir/log"
    train late --set spillway.checkpoint_dir="$dir/$family.ck" --set spillway.steps=2 &&
        train "" --resume "$dir/$family.ck" --set spillway.checkpoint_dir="$dir/$family.ck" --set spillway.run_log="$dir/log2"
    # And from a checkpoint of state on the device, which is the file that state in host memory makes.
    train late --set spillway.checkpoint_dir="$dir/$family.there" --set spillway.steps=2 "${all_there[@]}"
    for file in model.safetensors optimizer-00001-of-00001.safetensors; do
        check "$family, the same $file" cmp "$dir/$family.ck/step-2/$file" "$dir/$family.there/step-2/$file"
    done
    losses "$dir/$family.cuda" | tail -n 2 >"$dir/one"
    losses "$dir/log2" | tail -n 2 >"$dir/two"
    check "$family goes on from a checkpoint with the same numbers" cmp "$dir/one" "$dir/two"

    # Generation: device auto is the cpu device when there is no plugin.
    on fp32 "" train "$dir/$family.json" --quiet --set spillway.device=auto --set spillway.checkpoint_dir="$dir/$family.auto" >"$dir/out" 2>&1
    prompts=(--prompt "line 7 says" --prompt "line" --prompt "a" --tokens 20 --temperature 0)
    SPW_CUDA_PLUGIN=$dir/none "$spw" generate "$dir/$family.auto" "${prompts[@]}" >"$dir/greedy" 2>"$dir/out"
    for streams in "" late; do
        on fp32 "$streams" generate "$dir/$family.auto" "${prompts[@]}" >"$dir/two" 2>>"$dir/out"
        check "$family, ${streams:-early} streams, generates what the cpu device does" cmp "$dir/greedy" "$dir/two"
    done
done
# Mixtures of experts, of which what a few rows choose is fetched; packed weights; layers with and without windows, by two tables of
# positions: the same in every placement.
experts='"model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8' experts_more=', "router_balance": 0.02'
shared='"model_type": "qwen2_moe", "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 60' shared_more=', "tile_vocab": 64'
phi3='"model_type": "phi3", "intermediate_size": 60, "sliding_window": 30, "resid_pdrop": 0.1, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 30,
  "rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.5, 9.0]}' phi3_more=', "tile_tokens": 14'
gemma='"model_type": "gemma3_text", "intermediate_size": 72, "query_pre_attn_scalar": 12, "sliding_window": 9, "sliding_window_pattern": 2, "head_dim": 8,
  "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}' gemma_more=', "tile_vocab": 64'
gemma2='"model_type": "gemma2", "intermediate_size": 72, "query_pre_attn_scalar": 12, "sliding_window": 9, "head_dim": 8, "attn_logit_softcapping": 0.3,
  "final_logit_softcapping": 2.0' gemma2_more=', "tile_tokens": 15, "tile_vocab": 100'
oss='"model_type": "gpt_oss", "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 9,
  "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096}' oss_more=
deepseek='"model_type": "deepseek_v3", "intermediate_size": 60, "moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2,
  "first_k_dense_replace": 1, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8' deepseek_more=', "tile_tokens": 13'
linear='"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16, "full_attention_interval": 2, "head_dim": 8'
qwen3_5='"model_type": "qwen3_5_text", "intermediate_size": 60, '$linear qwen3_5_more=', "tile_tokens": 14'
next='"model_type": "qwen3_next", "moe_intermediate_size": 24, "shared_expert_intermediate_size": 36, "num_experts": 6, "num_experts_per_tok": 2, '$linear next_more=
granite='"model_type": "granitemoehybrid", "intermediate_size": 60, "shared_intermediate_size": 60, "num_local_experts": 0, "residual_multiplier": 0.5, "mamba_n_heads": 4,
  "mamba_d_head": 24, "mamba_d_state": 40, "layer_types": ["mamba", "attention", "mamba"]' granite_more=', "tile_tokens": 14'
nemotron='"model_type": "nemotron_h", "hybrid_override_pattern": "ME*", "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
  "moe_shared_expert_intermediate_size": 36, "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 40' nemotron_more=', "tile_tokens": 14'
kimi='"model_type": "kimi_linear", "intermediate_size": 60, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_token": 2, "kv_lora_rank": 24, "qk_nope_head_dim": 8,
  "qk_rope_head_dim": 8, "v_head_dim": 8, "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2], "head_dim": 24, "num_heads": 3}' kimi_more=', "tile_tokens": 14'
four='"model_type": "gemma4_text", "intermediate_size": 72, "enable_moe_block": true, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24, "sliding_window": 9,
  "head_dim": 8, "global_head_dim": 264, "attention_k_eq_v": true, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 2.0,
  "initializer_range": 0.1, "tie_word_embeddings": false, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]' four_more=
v4='"model_type": "deepseek_v4", "moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "qk_rope_head_dim": 4, "q_lora_rank": 20,
  "o_groups": 2, "o_lora_rank": 12, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 3, "sliding_window": 9, "hc_sinkhorn_iters": 5, "num_hash_layers": 1,
  "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
  "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]' v4_more=', "tile_tokens": 14'
small='"model_type": "gemma4_text", "intermediate_size": 36, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 256,
  "num_kv_shared_layers": 1, "use_double_wide_mlp": true, "layer_types": ["full_attention", "full_attention", "full_attention"]' small_more=', "tile_tokens": 14'
first=host
for family in experts shared phi3 gemma gemma2 oss deepseek qwen3_5 next granite nemotron kimi v4 four small; do
    more=${family}_more kv_heads=2 lr=2e-3
    [ $family = four ] && lr=2e-4 # its scores, which nothing divides, make steps of roundings
    [ $family = deepseek ] || [ $family = kimi ] && kv_heads=6
    [ $family = v4 ] && kv_heads=1
    cat >"$dir/$family.json" <<JSON
{ "model": {${!family}, "vocab_size": 256, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": $kv_heads,
            "max_position_embeddings": 64},
  "data": {"path": ["$dir/text.txt"], "seq_length": 40, "seed": 1}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
  "gradient_clipping": 1.0, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": $lr}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
  "spillway": {"steps": 2, "seed": 3, "device": "cpu", "fill_device": "never", "chunk_elems": 8192, "eval_interval": 2, "eval_batches": 2${!more}} }
JSON
    "$spw" train "$dir/$family.json" --quiet --set spillway.run_log="$dir/$family.cpu" >"$dir/out" 2>&1
    train "" --set spillway.device=auto --set spillway.run_log="$dir/$family.cuda" --set spillway.checkpoint_dir="$dir/$family.ck"
    check "$family: the losses of the cpu device" near "$dir/$family.cpu" "$dir/$family.cuda" 1e-4 5
    on "" "" train "$dir/$family.json" --set spillway.device=cuda --set spillway.run_log="$dir/$family.$first" >"$dir/out" 2>&1
    case $family in experts) places="there nvme kept turns all_turns" ;; shared | oss | four | nemotron | kimi | v4) places="there nvme turns all_turns" ;; *) places="there nvme kept" ;; esac
    for place in $places; do
        set -- --set spillway.run_log="$dir/$place" --set spillway.chaos_seed=9
        [ $place = turns ] && set -- "$@" --set spillway.expert_turns=3 --set spillway.recompute=always --set "zero_optimization.offload_optimizer=$nvme"
        [ $place = all_turns ] && set -- "$@" --set spillway.expert_turns=6 "${all_there[@]}"
        [ $place = there ] && set -- "$@" "${all_there[@]}"
        [ $place = nvme ] && set -- "$@" --set spillway.recompute=always --set "zero_optimization.offload_param=$nvme" --set "zero_optimization.offload_optimizer=$nvme"
        [ $place = kept ] && set -- "$@" --set spillway.device_memory=1GiB
        on "" late train "$dir/$family.json" --set spillway.device=cuda "$@" >"$dir/out" 2>&1
        check "$family in bf16, $place: the same numbers" same "$dir/$family.$first" "$dir/$place"
    done
    sed -i 's/"grad_norm":[^,]*/"grad_norm":0/' "$dir/$family.cpu" "$dir/$family.$first"
    check "$family in bf16 has losses near them" near "$dir/$family.cpu" "$dir/$family.$first" 2e-2 5
    prompts=(--prompt "line 7 says" --prompt "a" --tokens 20 --temperature 0)
    SPW_CUDA_PLUGIN=$dir/none "$spw" generate "$dir/$family.ck" "${prompts[@]}" >"$dir/greedy" 2>"$dir/out"
    on fp32 late generate "$dir/$family.ck" "${prompts[@]}" --nvme "$dir/swap" >"$dir/two" 2>>"$dir/out"
    check "$family: generates from nvme what the cpu device does" cmp "$dir/greedy" "$dir/two"
done
# Adapters beside those experts: a rank that no kernel's widest words fit.
family=experts
beside=(--set 'spillway.lora={"rank":3,"alpha":4,"targets":["q_proj"],"target_parameters":["experts.*"]}')
"$spw" train "$dir/$family.json" --quiet "${beside[@]}" --set spillway.run_log="$dir/beside.cpu" >"$dir/out" 2>&1
train late "${beside[@]}" --set spillway.expert_turns=3 --set spillway.run_log="$dir/beside.cuda"
check "adapters beside experts: the losses of the cpu device" near "$dir/beside.cpu" "$dir/beside.cuda" 1e-4 5
train "" "${beside[@]}" --set spillway.run_log="$dir/beside.whole"
check "adapters beside experts at once: the same numbers as in turns" same "$dir/beside.whole" "$dir/beside.cuda"
check "text was generated" test "$(wc -c <"$dir/greedy")" -gt 60

# What the device cannot do yet is refused before anything is taken.
family=gpt2
refuse() { name=$1 text=$2; shift 2; "$@" >"$dir/out" 2>&1; check "$name" grep -qF -- "$text" "$dir/out"; }
refuse "records on the device without their weights are refused" "set zero_optimization.offload_optimizer.device to cpu" \
    train "" --set 'zero_optimization.offload_optimizer={"device": "none"}'
echo "1..$n"
