#!/bin/bash
# Training on pairs of answers at the command line: the start is asked once, losses are the same in every placement and on ranks, a run goes on
# with what the start found, and what is refused. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-preference-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
export XDG_CACHE_HOME=$dir/cache
python3 - "$dir" <<'PY'
import json, sys
d = sys.argv[1]
word = lambda i: ("no", "yes")[i % 2 == 0]
pair = lambda i: {"prompt": "Is %d even? " % i, "chosen": word(i), "rejected": word(i + 1) + " " * (i % 3)}
lines = lambda name, rows: open(d + "/" + name, "w").write("".join(json.dumps(r) + "\n" for r in rows))
lines("pairs.jsonl", [pair(i) for i in range(300)])
lines("other.jsonl", [pair(i) for i in range(1, 301)])
lines("long.jsonl", [pair(i) for i in range(40)] + [{"prompt": "How long? " * 20, "chosen": "so", "rejected": "not so"}])
turn = lambda r, t: {"role": r, "content": t}
lines("talks.jsonl", [{"prompt": [turn("user", "Is %d even?" % i)], "chosen": [turn("assistant", "yes")], "rejected": [turn("assistant", "no")]} for i in range(200)])
c = {"model": {"model_type": "llama", "vocab_size": 256, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3,
               "intermediate_size": 160, "max_position_embeddings": 128},
     "data": {"path": [d + "/pairs.jsonl"], "seq_length": 128, "seed": 3, "validation_split": 0.1},
     "train_micro_batch_size_per_gpu": 2, "train_batch_size": 8, "gradient_clipping": 1.0,
     "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
     "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
     "spillway": {"preference": {"loss": "dpo", "beta": 0.5}, "steps": 24, "seed": 1, "device": "cpu", "checkpoint_dir": d + "/ckpt",
                  "checkpoint_interval": 9, "eval_interval": 8, "eval_batches": 2, "chunk_elems": 8192}}
json.dump(c, open(d + "/c.json", "w"))
PY
c=$dir/c.json
log() { grep '"loss"' "$1" | sed 's/"grad_norm.*//'; }                                            # steps with their losses
near() { python3 -c 'import json, sys; a, b = [[json.loads(l) for l in open(f) if "\"loss\"" in l] for f in sys.argv[1:3]]; sys.exit(0 if len(a) == len(b) > 0 and all(abs(x["loss"] - y["loss"]) <= 2e-6 * abs(y["loss"]) and x["preferred"]["right"] == y["preferred"]["right"] for x, y in zip(a, b)) else 1)' "$1" "$2"; }
logged() { python3 -c 'import json, math, sys; r = [json.loads(l) for l in open(sys.argv[1]) if "\"loss\"" in l]; sys.exit(0 if eval(sys.argv[2]) else 1)' "$1" "$2"; }
trains() { run train "$c" --set spillway.run_log="$1" --set spillway.checkpoint_dir= "${@:2}"; }

mkdir -p "$dir/swap"
nvme="--set zero_optimization.offload_param.device=nvme --set zero_optimization.offload_param.nvme_path=$dir/swap --set zero_optimization.offload_optimizer.device=nvme --set zero_optimization.offload_optimizer.nvme_path=$dir/swap"

check "pairs are trained on" run train "$c" --set spillway.run_log="$dir/a.log" --set csv_monitor='{"enabled": true, "output_path": "'"$dir"'", "job_name": "csv"}'
check "monitors have it" test "$(grep -c '^[0-9]' "$dir/csv/Train_Samples_right.csv")" -eq 24 -a "$(grep -c '^[0-9]' "$dir/csv/Train_Samples_eval_right.csv")" -eq 3
check "the start is asked once about what is drawn, and evaluated" grep -Eq '^reference  [0-9]+ of [0-9]+ sequences were asked about in' "$dir/out"
check "which it finds as likely as itself, to the last bit" logged "$dir/a.log" 'abs(r[0]["loss"] - math.log(2)) < 1e-12 and r[0]["preferred"]["chosen"] == 0 and r[0]["preferred"]["rejected"] == 0'
check "it learns which answers are right" logged "$dir/a.log" 'r[-1]["loss"] < 0.3 and r[-1]["preferred"]["right"] > 0.8 and r[-1]["preferred"]["chosen"] > r[-1]["preferred"]["rejected"] and len(r) == 24'
check "of those held out too" logged "$dir/a.log" 'r[-1]["eval_preferred"]["right"] > 0.7 and r[-1]["eval_loss"] < 0.4 and "eval_preferred" not in r[-2]'
check "a line says so" grep -Eq '^step 24/24  loss [0-9.]+  right [0-9]+%  margin [0-9.]+  .*eval [0-9.]+  right [0-9]+%' "$dir/out"
moved() { python3 -c 'import json, sys; print(sorted(json.load(open(sys.argv[1]))["step"].items()))' "$dir/out"; }
check "a plan of it" run plan "$c" --no-measure --json $nvme
moved >"$dir/moved"
check "says what is asked" grep -q '"value": "88 sequences"' "$dir/out"
check "and one of texts" run plan "$c" --no-measure --json $nvme --set spillway.preference.loss=none --set data.text_field=chosen
check "move the same in a step" test "$(moved)" = "$(cat "$dir/moved")" -a -s "$dir/moved"
check "what the start found is beside the checkpoints" test -s "$dir/ckpt/reference.bin"

# The same numbers, wherever state lies and whoever computes them.
check "on nvme" trains "$dir/b.log" $nvme
check "the same losses" test "$(log "$dir/a.log")" = "$(log "$dir/b.log")"
check "in two passes a step" trains "$dir/b.log" --set spillway.micro_batches_per_pass=2
check "alike" near "$dir/b.log" "$dir/a.log"
check "the head in pieces" trains "$dir/b.log" --set spillway.tile_vocab=64
check "alike, too" near "$dir/b.log" "$dir/a.log"
check "two ranks" trains "$dir/b.log" -n 2
check "ask about the same, and learn the same" near "$dir/b.log" "$dir/a.log"

# Going on.
check "a run goes on from step 9" run train "$c" --resume "$dir/ckpt/step-9" --set spillway.run_log="$dir/c.log" --set spillway.checkpoint_dir="$dir/next"
check "without asking" test "$(grep -c '^reference' "$dir/out")" -eq 0
check "to the same losses" test "$(log "$dir/c.log")" = "$(log "$dir/a.log" | tail -n 15)"
check "and keeps what was found" cmp -s "$dir/ckpt/reference.bin" "$dir/next/reference.bin"
check "two ranks do" run train "$c" --resume "$dir/ckpt/step-9" --set spillway.run_log="$dir/d.log" --set spillway.checkpoint_dir= -n 2
tail -n 15 <(grep '"loss"' "$dir/a.log") >"$dir/a9.log"
check "to losses alike" near "$dir/d.log" "$dir/a9.log"
# Checkpoints are nothing without what their own start found: no other run's takes its place.
expects="run train $c"
expect 2 "would replace: take another folder" "another start in their folder is refused" --set spillway.seed=2
expects="run train $c --resume $dir/b2/step-2"
check "a run elsewhere" run train "$c" --set spillway.seed=2 --set spillway.steps=2 --set spillway.reference_steps=24 --set spillway.checkpoint_dir="$dir/b2"
expect 2 "would replace: take another folder" "and going on from there, into it" --set spillway.seed=2
check "which changes nothing" cmp -s "$dir/ckpt/reference.bin" "$dir/next/reference.bin"
check "but again into where it is the same" run train "$c" --resume "$dir/ckpt/step-18" --set spillway.checkpoint_dir="$dir/next"
expects="run train $c --set spillway.checkpoint_dir= --resume $dir/ckpt/step-9"
expect 2 "spillway.preference.beta" "with another rule only if that is meant" --set spillway.preference.beta=0.1
cp "$dir/ckpt/reference.bin" "$dir/kept"
printf x | dd of="$dir/ckpt/reference.bin" bs=1 seek=200 conv=notrunc 2>/dev/null
expect 1 "its contents are not what its checksum says" "a damaged file" --set spillway.steps=24
head -c 100 "$dir/kept" >"$dir/ckpt/reference.bin"
expect 1 "its contents are not what its checksum says" "half a file" --set spillway.steps=24
rm "$dir/ckpt/reference.bin"
expect 1 "cannot be asked again" "none" -n 2
check "is said once" test "$(grep -c 'cannot be asked again' "$dir/err")" -eq 1
cp "$dir/kept" "$dir/ckpt/reference.bin"
check "fewer steps were asked about less" run train "$c" --set spillway.steps=2 --set spillway.checkpoint_dir="$dir/two"
expects="run train $c --set spillway.checkpoint_dir= --resume $dir/two"
expect 1 "was not asked about sequence" "more than was asked about" --set spillway.steps=24
check "but for who asks about more" run train "$c" --set spillway.steps=2 --set spillway.reference_steps=24 --set spillway.checkpoint_dir="$dir/more"
check "can be lengthened" run train "$c" --set spillway.checkpoint_dir= --resume "$dir/more" --set spillway.steps=24 --set spillway.run_log="$dir/e.log"
check "to the losses of a run that was as long" test "$(log "$dir/e.log")" = "$(log "$dir/a.log" | tail -n 22)"
expect 1 "spillway.reference_steps asks about more" "more than was asked about, which says how" --set spillway.steps=24
check "is said before the first step" test "$(grep -c "^step" "$dir/out")" -eq 0

# Evaluated by themselves: rewards are beta times what evaluations of the answers as texts behind their prompts sum up to.
p="--set data.prompt_field=prompt --set spillway.checkpoint_interval=0 --set spillway.run_log="
check "a start" run train "$c" $p --set spillway.steps=1 --set optimizer.params.lr=0 --set spillway.checkpoint_dir="$dir/start"
check "and what becomes of it" run train "$c" $p --set spillway.checkpoint_dir="$dir/end"
evaluated() { # FILE ARGS...
    "$spw" eval "${@:2}" --data "$dir/pairs.jsonl" --json >"$dir/$1" 2>"$dir/err"
}
for of in start end; do
    for field in chosen rejected; do check "texts of $field answers, $of" evaluated $of.$field "$dir/$of" --text-field $field; done
    check "pairs, $of" evaluated $of.pairs "$dir/$of" --pairs
done
check "beside the start" evaluated beside "$dir/end" --pairs --reference "$dir/start"
check "the start beside itself" evaluated itself "$dir/start" --pairs --reference "$dir/start"
check "in other batches, from disk" evaluated disk "$dir/end" --pairs --reference "$dir/start" --batch-size 7 --nvme "$dir/swap" --host-memory 100MiB
cat >"$dir/same.py" <<'PY'
import json, math, sys
got = lambda name: json.load(open(sys.argv[1] + "/" + name))
sums = {(of, k): got(of + "." + k)["loss"] * got(of + "." + k)["tokens"] for of in ("start", "end") for k in ("chosen", "rejected")}
near = lambda a, b: abs(a - b) <= 2e-6 * max(abs(a), abs(b), 1)
for of in ("start", "end"):
    r = got(of + ".pairs")
    assert r["pairs"] == 300 and r["rule"] == "dpo" and all(near(r[k] * 300, -0.5 * sums[of, k]) for k in ("chosen", "rejected")), r
b = got("beside")
assert all(near(b[k] * 300, 0.5 * (sums["start", k] - sums["end", k])) for k in ("chosen", "rejected")), b
assert b["right"] > 0.8 and b["loss"] < 0.4 and b["reference"].endswith("step-1"), b
r = got("itself")
assert r["right"] == r["chosen"] == r["rejected"] == 0 and abs(r["loss"] - math.log(2)) < 1e-12, r
assert all(near(got("disk")[k], b[k]) for k in ("loss", "right", "chosen", "rejected", "pairs")), got("disk")
PY
check "come to the same numbers" python3 "$dir/same.py" "$dir"
check "and leave nothing" test -z "$(ls -A "$dir/swap")"
expects="run eval $dir/end --data $dir/pairs.jsonl"
check "a line" run eval "$dir/end" --data "$dir/pairs.jsonl" --pairs --reference "$dir/start"
check "says how many are right" grep -Eq '^right 0\.[0-9]+  margin [0-9.]+  loss 0\.[0-9]+  300 pairs in [0-9]+ sequences of 128 ' "$dir/out"
expect 2 "--reference is for --pairs" "a reference of texts" --reference "$dir/start"
printf 'just text\n' >"$dir/t.txt"
expect 2 "pairs of answers are JSON lines" "pairs of text" --pairs --data "$dir/t.txt"
expects="run train $c --set spillway.checkpoint_dir= --set spillway.steps=2"

# A signal while the start is asked, which may take long: nothing is left of the run.
python3 -c 'for i in range(60000): print("{\"prompt\": \"Is %d even? \", \"chosen\": \"yes\", \"rejected\": \"no\"}" % i)' >"$dir/many.jsonl"
"$spw" train "$c" --set data.path="$dir/many.jsonl" --set spillway.steps=100000 --set spillway.checkpoint_dir="$dir/never" $nvme >"$dir/out" 2>"$dir/err" &
pid=$!
check "what was asked so far is shown" comes grep -q '^reference .* left ' "$dir/out"
kill -TERM $pid
wait $pid
check "a signal ends the asking with 1" test $? -eq 1 -a -n "$(grep 'stopped before the first step' "$dir/err")"
check "and leaves neither swap files nor a folder" test -z "$(ls -A "$dir/swap")" -a ! -e "$dir/never"

# What is refused.
expects="run train $c --set spillway.checkpoint_dir= --set spillway.steps=2"
expect 2 "label_smoothing is of dpo and simpo" "smoothed labels with ipo" --set spillway.preference='{"loss":"ipo","label_smoothing":0.1}'
expect 2 "margin is of simpo" "a margin with dpo" --set spillway.preference.margin=1
expect 2 "would cut pairs" "windows that cut" --set data.documents=mask
expect 2 "dpo" "another loss" --set spillway.preference.loss=kto
printf 'just text\n' >"$dir/t.txt"
expect 2 "JSON lines" "text" --set data.path="$dir/t.txt"
expect 1 "worse" "a field that is missing" --set data.rejected_field=worse
for q in '"question": "Is %d even?", "chosen": "yes %d", "rejected": "no"' '"chosen": "Is %d even? yes %d", "rejected": "Is it? no"'; do
    for i in 1 2 3 4 5 6 7 8 9; do printf "{$q}\n" $i $i; done >"$dir/q${q:1:1}.jsonl"
done
expect 0 "no pair has a prompt: no line has field \"prompt\" (data.prompt_field)" "prompts with another name" --set data.path="$dir/qq.jsonl" --set data.validation_split=0
check "texts that have them within" run train "$c" --set spillway.checkpoint_dir= --set spillway.steps=2 --set data.path="$dir/qc.jsonl" --set data.validation_split=0
check "are not said to have none" test "$(grep -c 'has a prompt' "$dir/err")" -eq 0

case $build in *asan | *tsan) echo "1..$n"; exit 0 ;; esac # test_torch has the rules there

# Adapters, other rules, other forms.
lora='--set spillway.lora={"rank":8,"alpha":16,"targets":["q_proj","v_proj","up_proj"]} --set optimizer.params.lr=0.02'
check "adapters" trains "$dir/b.log" $lora $nvme
check "begin as likely as without, and learn" logged "$dir/b.log" 'abs(r[0]["loss"] - math.log(2)) < 1e-12 and r[-1]["loss"] < 0.6 and r[-1]["preferred"]["right"] > 0.7'
check "ipo" trains "$dir/b.log" --set spillway.preference.loss=ipo
check "begins where its aim is as far as it is" logged "$dir/b.log" 'r[0]["loss"] == 1 and r[-1]["loss"] < 0.5'
check "simpo" trains "$dir/b.log" --set spillway.preference='{"loss":"simpo","margin":0.5}'
check "has no reference" test "$(grep -c '^reference' "$dir/out")" -eq 0
check "and learns" logged "$dir/b.log" 'r[-1]["loss"] < r[0]["loss"] - 0.3 and r[-1]["preferred"]["right"] > 0.9'
check "orpo" trains "$dir/b.log" --set spillway.preference.loss=orpo
check "has none either" test "$(grep -c '^reference' "$dir/out")" -eq 0
check "and makes the chosen answer likely" logged "$dir/b.log" 'r[-1]["loss"] < r[0]["loss"] - 0.5 and r[-1]["preferred"]["right"] > 0.9 and r[-1]["preferred"]["chosen"] > r[0]["preferred"]["chosen"]'
check "apo_zero" trains "$dir/b.log" --set spillway.preference.loss=apo_zero
check "begins at 1, and learns" logged "$dir/b.log" 'r[0]["loss"] == 1 and r[-1]["loss"] < 0.7 and r[-1]["preferred"]["chosen"] > 0 > r[-1]["preferred"]["rejected"]'
check "simpo's beta is 2 where none is given" test "$("$spw" plan "$c" --no-measure --set spillway.preference='{"loss":"simpo"}' >/dev/null 2>&1; echo $?)" -eq 0
check "the chosen answer's likelihood beside dpo" trains "$dir/b.log" --set spillway.preference='{"loss":"dpo","beta":0.5,"likelihood":1}'
check "keeps it likely" logged "$dir/b.log" 'r[-1]["preferred"]["chosen"] > 0'
check "conversations" trains "$dir/b.log" --set data.path="$dir/talks.jsonl" --set data.tokenizer=tests/vectors/tok_qwen2.json --set data.chat=chatml --set model.vocab_size=151936 --set model.hidden_size=48 --set spillway.steps=3
check "are pairs too" logged "$dir/b.log" 'abs(r[0]["loss"] - math.log(2)) < 1e-12 and r[-1]["loss"] < r[0]["loss"]'
cat >"$dir/apart.jsonl" <<'LINES'
{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "rejected": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "b"}]}
{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}
{"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}], "rejected": [{"role": "assistant", "content": "c"}]}
LINES
expect 0 "answers of 1 of 3 pairs are to different prompts" "answers to different prompts are said" --set data.path="$dir/apart.jsonl" --set data.tokenizer=tests/vectors/tok_qwen2.json --set data.chat=chatml --set data.validation_split=0 --set model.vocab_size=151936 --set model.hidden_size=48 --set spillway.steps=1
check "a pair that no sequence holds" trains "$dir/b.log" --set data.path="$dir/long.jsonl" --set spillway.steps=1
check "is left out, which is said" grep -q 'warning: 1 of 41 pairs are left out' "$dir/err"

# On a device of its own, in bf16.
if [ -f "$build/emulated/spillway-cuda.so" ]; then
    export SPW_CUDA_PLUGIN SPW_EMULATE_GUARD=1
    SPW_CUDA_PLUGIN=$(realpath "$build/emulated/spillway-cuda.so")
    bf16="--set bf16.enabled=true --set spillway.device=cuda --set spillway.steps=3"
    check "on a device apart" trains "$dir/b.log" $bf16
    check "in bf16" logged "$dir/b.log" 'abs(r[0]["loss"] - math.log(2)) < 1e-12 and r[-1]["loss"] < r[0]["loss"]'
    check "streams that are late" env SPW_EMULATE_STREAMS=late "$spw" train "$c" --quiet --set spillway.run_log="$dir/d.log" --set spillway.checkpoint_dir= $bf16 $nvme
    check "with state on nvme change no bit" test "$(log "$dir/d.log")" = "$(log "$dir/b.log")"
else
    n=$((n + 1)); echo "ok $n - a device apart # SKIP no C++ compiler when this was built"
fi
echo "1..$n"
