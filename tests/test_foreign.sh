#!/bin/bash
# From DeepSpeed, FSDP and llm.c to here on the command line: their checkpoints looked at, gone on from, made a folder of; and what is said of them. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
spw=${SPW_BUILD:-build/release}/spillway
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-foreign-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
run() { timeout -s KILL 300 "$spw" "$@" >"$dir/out" 2>"$dir/err"; }
said() { grep -qF -- "$1" "$dir/err" "$dir/out"; }
cp README.md "$dir/text"
mkdir "$dir/start"
cat >"$dir/start/config.json" <<JSON
{"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
 "vocab_size": 19, "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": false}
JSON
cp tests/vectors/deepspeed/start.safetensors "$dir/start/model.safetensors"
# 20001 tokens below 19, in llm.c's form.
tokens() { awk 'BEGIN { x = 1; for (i = 0; i < 20001; i++) { x = (x * 75 + 74) % 65537; printf "\\0%o\\0000%s", x % 19, i % 500 == 499 ? "\n" : "" } print "" }'; }
{ printf '\x88\xd8\x34\x01\x01\0\0\0\x21\x4e\0\0'; head -c 1012 /dev/zero; tokens | while read -r line; do printf %b "$line"; done; } >"$dir/t.bin"
cat >"$dir/c.json" <<JSON
{ "train_batch_size": 6, "gradient_clipping": 1.0, "model": {"path": "$dir/start"},
  "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 6, "warmup_type": "linear"}},
  "data": {"path": "$dir/t.bin", "seq_length": 8},
  "spillway": {"steps": 8, "device": "cpu", "checkpoint_dir": "$dir/a", "run_log": "$dir/a.jsonl"} }
JSON
c=$dir/c.json
theirs=tests/vectors/deepspeed/stage3

check "inspect" run inspect "$theirs"
check "says what it is" said "checkpoint of DeepSpeed 0.19.8: ZeRO stage 3, 3 ranks, step 4, 4 updates; kept for each parameter: exp_avg exp_avg_sq"
check "and lists its parameters" said "21 tensors, 1304 elements, 5.09 KiB"
check "inspect --json of the folder inside" run inspect "$theirs/global_step4" --json
check "is JSON" python3 -c "import json,sys; d=json.load(open('$dir/out')); sys.exit(d['foreign']['stage'] != 3 or len(d['tensors']) != 21)"

expect 2 "train_batch_size: 3 in the checkpoint, 6 now" "another batch is refused" train "$c" --resume "$theirs"
check "and nothing was written" test ! -e "$dir/a/step-8"
check "unless it is meant" run train "$c" --resume "$theirs" --resume-anyway
check "which says where it goes on" said "resumed  at step 4 of another program's checkpoint; which sequences it took is not known: this program's order goes on behind the first 12"
check "its own checkpoint is where it ends" test -e "$dir/a/step-8/spillway.json"
check "as far as step 6" run train "$c" --resume "$theirs/global_step4" --resume-anyway --set spillway.steps=6 --set spillway.checkpoint_dir="$dir/b" --set spillway.run_log=
check "and from there" run train "$c" --resume "$dir/b" --set spillway.checkpoint_dir="$dir/b" --set spillway.run_log=
same() { for f in model optimizer-00001-of-00001; do cmp "$1/$f.safetensors" "$2/$f.safetensors" || return 1; done; }
check "is the same" same "$dir/a/step-8" "$dir/b/step-8"
check "on two ranks, three micro-batches each" run train "$c" -n 2 --resume "$theirs" --resume-anyway --set train_micro_batch_size_per_gpu=1 \
    --set zero_optimization.stage=3 --set spillway.checkpoint_dir="$dir/r" --set spillway.run_log="$dir/r.jsonl"
near() { paste <(grep -o '"loss":[^,]*' "$1" | cut -d: -f2) <(grep -o '"loss":[^,]*' "$2" | cut -d: -f2) |
    awk '{ d = $1 / $2 - 1; if (d > 1e-6 || d < -1e-6) bad = 1 } END { exit bad || NR != 4 }'; }
check "has the losses of one" near "$dir/a.jsonl" "$dir/r.jsonl"
# Their own folder as the one of checkpoints: what this program saved there is the newer one.
cp -r "$theirs" "$dir/both"
check "into the same folder" run train "$c" --resume "$dir/both" --resume-anyway --set spillway.steps=6 --set spillway.checkpoint_dir="$dir/both" --set spillway.run_log=
check "and on from it" run train "$c" --resume "$dir/both" --set spillway.checkpoint_dir="$dir/both" --set spillway.run_log=
check "with what was saved there" said "resumed  at step 6"

expect 1 "--model FOLDER names the folder that training began with" "export wants to know the model" export "$theirs" --to "$dir/x"
check "nothing is left" test ! -e "$dir/x"
check "export" run export "$theirs" --to "$dir/x" --model "$dir/start"
check "has fp32 masters" run inspect "$dir/x" --digest
grep '^  model' "$dir/out" | sed 's/  */ /g' | sort >"$dir/want"
check "of the model" said "the tensors are this model's"
run inspect "$theirs" --digest
check "the same bits" cmp -s <(grep '^  model' "$dir/out" | sed 's/  */ /g' | sort) "$dir/want"
check "as bf16, in shards" run export "$theirs" --to "$dir/y" --model "$dir/start" --dtype bf16 --shard-size 1KB
check "evaluated" run eval "$dir/y" --data "$dir/t.bin"
expect 1 "is another program's checkpoint: spillway export" "generate says what to do" generate "$theirs" --prompt a
expect 1 "--resume takes" "a file of it alone is none" inspect "$theirs/global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt"

# All files of all ranks are open at once: the soft limit, often 1024, is raised to the hard one.
few() { (ulimit -S -n 10 && exec timeout -s KILL 60 "$spw" "$@" >"$dir/out" 2>"$dir/err"); }
check "export with few open files" few export "$theirs" --to "$dir/few" --model "$dir/start"
check "is the same" cmp -s "$dir/x/model.safetensors" "$dir/few/model.safetensors"

# As a Trainer leaves it, with weights in 16 bits and config.json in one folder with DeepSpeed's state or FSDP's: masters go first.
rows() { grep '^  model' "$dir/out" | sed 's/  */ /g' | sort; }
for f in deepspeed/stage3 fsdp/trainer; do
    both=$dir/checkpoint-${f%/*}
    cp -r "tests/vectors/$f" "$both"
    cp "$dir/y/"* "$both"
    echo '{"eos_token_id": 3}' >"$both/generation_config.json"
    run inspect "tests/vectors/$f" --digest
    rows >"$dir/want"
    check "inspect a Trainer's of ${f%/*}" run inspect "$both" --digest
    check "shows the masters" cmp -s <(rows) "$dir/want"
    check "says so" said "the weights in Hugging Face's files beside it are not shown"
    check "and that they fit its config.json" said "the tensors are this model's"
    check "export without --model" run export "$both" --to "$both-x"
    check "says what was taken" said "its masters are taken, not the weights in Hugging Face's files beside it"
    check "what lies beside them came along" cmp -s "$both/generation_config.json" "$both-x/generation_config.json"
    run inspect "$both-x" --digest
    check "has the masters' bits" cmp -s <(rows) "$dir/want"
    run eval "$dir/y" --data "$dir/t.bin"
    sed 's/ sequences.*//' "$dir/out" >"$dir/loss" # not how fast
    run eval "$both" --data "$dir/t.bin"
    check "eval is of the 16 bits" cmp -s <(sed 's/ sequences.*//' "$dir/out") "$dir/loss"
done
expect 0 "It may be a Trainer's checkpoint-N" "help says so" help export
echo damage >"$dir/checkpoint-deepspeed/global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt"
expect 1 "in a folder of their own" "what else can be exported is said where masters cannot be read" export "$dir/checkpoint-deepspeed" --to "$dir/x2"

# PyTorch's, of FSDP: in one folder, or as a Trainer leaves them.
for f in checkpoint trainer; do
    check "inspect $f of FSDP" run inspect "tests/vectors/fsdp/$f"
    check "says what it is" said "checkpoint of PyTorch: 3 ranks, step 4, 4 updates; kept for each parameter: exp_avg exp_avg_sq"
    expect 2 "spillway.freeze: model.layers.0.mlp.up_proj.weight was frozen in the checkpoint, is trained now" "what was frozen stays so" train "$c" --resume "tests/vectors/fsdp/$f"
    check "goes on from $f" run train "$c" --resume "tests/vectors/fsdp/$f" --set 'spillway.freeze=["*.0.mlp.up_proj.weight"]' --set spillway.checkpoint_dir="$dir/fsdp-$f" --set spillway.run_log=
    check "behind as many batches" said "goes on behind the first 24"
done
check "the same" same "$dir/fsdp-checkpoint/step-8" "$dir/fsdp-trainer/step-8"
for f in full full_hf; do
    check "from one file of all its state, $f" run train "$c" --resume "tests/vectors/fsdp/$f" --set 'spillway.freeze=["*.0.mlp.up_proj.weight"]' --set spillway.checkpoint_dir="$dir/fsdp-$f" --set spillway.run_log=
    check "the same" same "$dir/fsdp-checkpoint/step-8" "$dir/fsdp-$f/step-8"
done
check "export of FSDP's" run export tests/vectors/fsdp/trainer --to "$dir/fsdp" --model "$dir/start"
cp -r tests/vectors/fsdp/trainer "$dir/model-alone"
rm -r "$dir/model-alone/optimizer_0"
check "of a model that was saved alone" run export "$dir/model-alone" --to "$dir/fsdp-alone" --model "$dir/start"
check "the same weights" cmp "$dir/fsdp/model.safetensors" "$dir/fsdp-alone/model.safetensors"
run inspect tests/vectors/fsdp/checkpoint --digest
grep '^  model' "$dir/out" | sed 's/  */ /g' | sort >"$dir/want"
run inspect "$dir/fsdp" --digest
check "has the same bits" cmp -s <(grep '^  model' "$dir/out" | sed 's/  */ /g' | sort) "$dir/want"

# Of a mixture whose experts are one tensor in each layer there, and parameters of their own here: moments of both go the same way.
{ printf '\x88\xd8\x34\x01\x01\0\0\0\x21\x03\0\0'; head -c 1012 /dev/zero; for i in $(seq 0 800); do printf '%b' "\\0$(printf %o $(((5 * (i % 8) * (i % 8) + 3 * (i % 8) + 2) % 19)))\\0000"; done; } >"$dir/same.bin"
cat >"$dir/experts.json" <<JSON
{ "train_batch_size": 2, "gradient_clipping": 0, "model": {"path": "tests/vectors/fsdp_experts"},
  "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
  "data": {"path": "$dir/same.bin", "seq_length": 8},
  "spillway": {"steps": 8, "device": "cpu", "router_balance": 0, "checkpoint_dir": "$dir/experts", "run_log": "$dir/experts.jsonl"} }
JSON
check "from FSDP with experts in one tensor" run train "$dir/experts.json" --resume tests/vectors/fsdp_experts
check "the losses are the ones it had" awk '{ d = $1 / $2 - 1; bad = bad || d > 1e-6 || d < -1e-6 } END { exit bad || NR != 4 }' \
    <(paste <(grep -o '"loss":[^,]*' "$dir/experts.jsonl" | cut -d: -f2) tests/vectors/fsdp_experts/losses)

# The state of a training without FSDP, which may be none: what lies beside it is a folder.
cp -r "$dir/start" "$dir/sgd"
cp tests/vectors/fsdp/broken/stateless.bin "$dir/sgd/optimizer.bin"
check "inspect beside an optimizer without names or state" run inspect "$dir/sgd"
check "shows the folder" said "the tensors are this model's"
check "export of it" run export "$dir/sgd" --to "$dir/sgd-x"

# Weights are shown and exported whatever the optimizer keeps.
check "inspect of 16 bits" run inspect tests/vectors/fsdp/half
check "says why it is no more" said "training cannot go on from it: tests/vectors/fsdp/half: optimizer.state.w.exp_avg is BF16; moments in fp32 are read"
cp -r tests/vectors/fsdp/full_hf "$dir/full-hf"
cp "$dir/start/config.json" "$dir/full-hf/"
cp tests/vectors/fsdp/broken/half.bin "$dir/full-hf/optimizer.bin"
check "export beside an optimizer in 16 bits" run export "$dir/full-hf" --to "$dir/full-hf-x"
check "whose weights are the folder's" test ! -s "$dir/err"
check "inspect of it" run inspect "$dir/full-hf"
check "shows them" test -z "$(grep "not shown" "$dir/out")"
expect 1 "exp_avg of model.embed_tokens.weight is BF16; moments in fp32 are read" "it is not gone on from" train "$c" --resume "$dir/full-hf"

# A checkpoint with config.json and no weights in Hugging Face's files: who names it means its weights, and would get others without a word.
for f in fsdp/trainer fsdp/full deepspeed/stage3; do
    cp -r "tests/vectors/$f" "$dir/${f#*/}"
    cp "$dir/start/config.json" "$dir/${f#*/}/"
    it=$dir/${f#*/}
    path="{\"path\":\"$it\"}"
    expect 2 "$it is another program's checkpoint, and has no weights in Hugging Face's files: --resume $it goes on" "no start from $f" train "$c" --set model="$path"
    expect 1 "$it is another program's checkpoint: spillway export $it --to DIR" "no evaluation of $f" eval "$it" --data "$dir/t.bin"
    check "its model alone" run train "$c" --set model="$path" --set spillway.start=random --set spillway.steps=1 --set spillway.checkpoint_dir= --set spillway.run_log=
    check "$f is gone on from" run train "$c" --set model="$path" --resume "$it" --resume-anyway --set 'spillway.freeze=["*.0.mlp.up_proj.weight"]' --set spillway.checkpoint_dir= --set spillway.run_log=
done

# That weights are drawn is said by who draws them.
mkdir "$dir/bare"
cp "$dir/start/config.json" "$dir/bare/"
bare="{\"path\":\"$dir/bare\"}"
check "a folder without weights" run train "$c" --set model="$bare" --set spillway.steps=1 --set spillway.checkpoint_dir="$dir/drawn" --set spillway.run_log=
check "is said to be one" said "model.path $dir/bare has no weights: they are drawn by spillway.seed"
check "gone on with" run train "$c" --set model="$bare" --set spillway.steps=2 --resume "$dir/drawn" --set spillway.checkpoint_dir="$dir/drawn" --set spillway.run_log=
check "it is not" test -z "$(grep drawn.by "$dir/err")"

# A Trainer's folder of checkpoints, and a checkpoint of its own optimizer's: what to give instead is said.
mkdir "$dir/out-dir" && mkdir "$dir/out-dir/checkpoint-9" "$dir/out-dir/checkpoint-x"
expect 1 "$dir/out-dir/checkpoint-9 is a checkpoint without the state of DeepSpeed or FSDP" "the newest of a Trainer's" train "$c" --resume "$dir/out-dir"
check "and what starts from it" said "model.path $dir/out-dir/checkpoint-9, without --resume, starts from its weights"
touch "$dir/out-dir/checkpoint-9/optimizer.pt"
expect 1 "$dir/out-dir/checkpoint-9 is a checkpoint without" "the same of the checkpoint" train "$c" --resume "$dir/out-dir/checkpoint-9"
expect 1 "$dir/sgd is a checkpoint without the state of DeepSpeed or FSDP" "and of accelerate's" train "$c" --resume "$dir/sgd"
cp -r tests/vectors/fsdp/trainer "$dir/out-dir/checkpoint-10"
expect 1 "$dir/out-dir is a folder of checkpoints, of which --resume $dir/out-dir/checkpoint-10 is the newest" "one that can be gone on from" train "$c" --resume "$dir/out-dir"

# A folder with pytorch_model.bin is trained from as one with safetensors is.
for f in one expect; do
    check "trains from $f" run train "$c" --set "model={\"path\":\"tests/vectors/torch/$f\"}" --set spillway.steps=3 --set spillway.checkpoint_dir="$dir/$f" --set spillway.run_log=
done
check "the same" same "$dir/one/step-3" "$dir/expect/step-3"
mkdir "$dir/swap"
for f in shards expect; do # frozen weights are read from the folder's own files
    check "with a frozen part on nvme, from $f" run train "$c" --set "model={\"path\":\"tests/vectors/torch/$f\"}" --set bf16.enabled=true --set 'spillway.freeze=["model.layers.0.*"]' \
        --set "zero_optimization={\"stage\":3,\"offload_param\":{\"device\":\"nvme\",\"nvme_path\":\"$dir/swap\"}}" --set spillway.steps=3 --set spillway.checkpoint_dir="$dir/f$f" --set spillway.run_log=
done
check "the same" same "$dir/fshards/step-3" "$dir/fexpect/step-3"
check "export of it" run export tests/vectors/torch/one --to "$dir/z"
check "has safetensors" test -e "$dir/z/model.safetensors" -a ! -e "$dir/z/pytorch_model.bin"
run inspect "$dir/z" --digest
grep '^  ' "$dir/out" | sed 's/  */ /g' | sort >"$dir/want"
run inspect tests/vectors/torch/expect --digest
check "with the same bits" cmp -s <(grep '^  ' "$dir/out" | sed 's/  */ /g' | sort) "$dir/want"
# llm.c's: the last one in its folder, or one by its model's file; what model it is of it says itself.
theirs=tests/vectors/llmc
for f in parts copies; do
    check "inspect $f of llm.c" run inspect "$theirs/$f"
    check "has its tensors" said "28 tensors, 2040 elements"
done
check "says what it is" said "checkpoint of llm.c: 2 ranks, step 4, 4 updates; kept for each parameter: exp_avg exp_avg_sq"
cat >"$dir/l.json" <<JSON
{ "train_batch_size": 2, "gradient_clipping": 1.0,
  "model": {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 19, "n_positions": 16},
  "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
  "data": {"path": "$dir/t.bin", "seq_length": 8}, "spillway": {"steps": 8, "device": "cpu"} }
JSON
check "goes on from the folder" run train "$dir/l.json" --resume "$theirs/parts" --set spillway.checkpoint_dir="$dir/lp"
check "behind as many batches" said "goes on behind the first 8"
check "and from the model's file" run train "$dir/l.json" --resume "$theirs/copies/model_00000004.bin" --set spillway.checkpoint_dir="$dir/lc"
check "the same" same "$dir/lp/step-8" "$dir/lc/step-8"
expect 2 "optimizer.params.betas: [0.9,0.95] in the checkpoint, [0.9,0.999] now" "what cannot be set there is compared" train "$dir/l.json" --resume "$theirs/parts" --set 'optimizer.params.betas=[0.9,0.999]'
check "export" run export "$theirs/parts" --to "$dir/lx"
check "says the model" grep -q '"n_head": 2' "$dir/lx/config.json"
run inspect "$dir/lx" --digest
check "of its tensors" said "the tensors are this model's"
sums() { grep -E '^  (h|wte|wpe|ln_f)[.]' "$dir/out" | sed 's/  */ /g' | sort; }
sums >"$dir/want"
check "all of them" test "$(wc -l <"$dir/want")" = 28
run inspect "$theirs/copies" --digest
check "which say their model" said "gpt2, 0.00204 M parameters: 2 layers, width 8, 2 heads of 4"
check "with the same bits" cmp -s <(sums) "$dir/want"
# Without masters the weights are all there is, here in bf16: a folder is of the type that they have.
mkdir "$dir/w0"
cp "$theirs/copies/"{model,DONE}_* "$dir/w0"
for f in "$theirs/copies/"state_*; do
    { head -c 16 "$f"; head -c 4 /dev/zero; head -c 24320 "$f" | tail -c +21; } >"$dir/w0/${f##*/}"
done
check "export without masters" run export "$dir/w0" --to "$dir/w0-x"
check "is as it is stored" said "3.98 KiB in bf16"
check "import of the model's file alone" run import "$theirs/one/model_00000004.bin" --to "$dir/ly"
check "which inspect shows" run inspect "$theirs/one/model_00000004.bin" --digest
sums >"$dir/want"
run inspect "$dir/ly" --digest
check "is the same" cmp -s <(sums) "$dir/want"
echo "1..$n"
