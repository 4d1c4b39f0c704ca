#!/bin/bash
# Conversations at the command line: training, planning, resuming, evaluation and answers with data.chat and --chat; what is refused. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-chat-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
said() { grep -qF -- "$1" "$dir/err"; }
python3 - "$dir" <<'PY'
import json, sys
d = sys.argv[1]
t = json.load(open("tests/vectors/tok_qwen2.json"))
size = max(max(t["model"]["vocab"].values()), *[a["id"] for a in t["added_tokens"]]) + 1
talk = lambda i: [{"role": "user", "content": "What is %d?" % i}, {"role": "assistant", "content": "yes"}]
open(d + "/c.jsonl", "w").write("".join(json.dumps({"messages": talk(i)}) + "\n" for i in range(200)))
open(d + "/old.jsonl", "w").write("".join(json.dumps({"conversations": [
    {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in talk(i)]}) + "\n" for i in range(200)))
open(d + "/pairs.jsonl", "w").write("".join(json.dumps({"prompt": talk(i)[:1], "chosen": [{"role": "assistant", "content": "no"}], "rejected": talk(i)[1:]}) + "\n" for i in range(200)))
open(d + "/bad.jsonl", "w").write(json.dumps({"messages": talk(1)}) + "\n" + json.dumps({"messages": [{"role": "user", "content": [{"type": "image"}]}]}) + "\n")
call = lambda arguments: {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]}
tools = lambda arguments: json.dumps({"messages": talk(1)[:1] + [call(arguments), {"role": "tool", "content": "5"}, {"role": "assistant", "content": "yes"}]}) + "\n"
open(d + "/tools.jsonl", "w").write(tools({"a": 1}) + tools('{"a": 1}'))
open(d + "/bad_tools.jsonl", "w").write(tools({}) + tools("{"))
json.dump({"user": ["Q: ", "\n"], "assistant": ["A: ", "<|endoftext|>\n"], "tokens": ["<|endoftext|>"]}, open(d + "/layout.json", "w"))
json.dump({"model": {"model_type": "llama", "vocab_size": size, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                     "intermediate_size": 64, "max_position_embeddings": 64},
           "data": {"path": [d + "/c.jsonl"], "seq_length": 32, "tokenizer": "tests/vectors/tok_qwen2.json", "chat": "auto"},
           "train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
           "spillway": {"steps": 20, "seed": 1, "device": "cpu", "checkpoint_dir": d + "/ckpt", "chunk_elems": 8192}}, open(d + "/c.json", "w"))
PY
c=$dir/c.json
losses() { grep -o '"step":[0-9]*,"loss":[^,]*' "$1"; }

check "a model is trained on conversations" run train "$c" --set spillway.run_log="$dir/a.log"
check "windows cut none" grep -Eq 'c.jsonl: 200 documents in [0-9]+ windows of 32 tokens, [0-9.]+% of them padding' "$dir/err"
check "the layout that the tokenizer decides is said" grep -qF "chat     auto: chatml, whose <|im_start|> <|im_end|> the tokenizer has" "$dir/out"
check "by a plan too, among its decisions" run plan "$c" --no-measure
check "with the reason" grep -q "data.chat  *chatml  *whose <|im_start|> <|im_end|> the tokenizer has" "$dir/out"
run plan "$c" --no-measure --json
check "in JSON as well" grep -q '"name": *"data.chat"' "$dir/out"
check "the older form of lines" run train "$c" --set "data.path=$dir/old.jsonl" --set spillway.run_log="$dir/b.log" --set spillway.checkpoint_dir= --set data.chat=chatml
check "gives the same losses" test "$(losses "$dir/a.log")" = "$(losses "$dir/b.log")"
check "and names a layout that was named" grep -qx "chat     chatml" "$dir/out"

# Another layout is other data.
expects="run train $c --set spillway.steps=21 --resume $dir/ckpt"
check "a run goes on with its layout" $expects --set spillway.checkpoint_dir=
check "a name for what auto took is no other" $expects --set spillway.checkpoint_dir= --set data.chat=chatml
expect 2 "encoder of training data" "and not with another" --set "data.chat=$dir/layout.json"
check "unless that is meant" $expects --set spillway.checkpoint_dir= --set "data.chat=$dir/layout.json" --resume-anyway

# Evaluation and answers.
check "eval counts the assistant's tokens" run eval "$dir/ckpt" --data "$dir/c.jsonl" --json
grep -o '"tokens": *[0-9]*' "$dir/out" | grep -o '[0-9]*' >"$dir/count"
check "three of each line, the end of the turn among them" test "$(cat "$dir/count")" -eq 600
check "generate answers a user's turn" run generate "$dir/ckpt" --chat auto --prompt "What is 5?" --temperature 0 --tokens 30 --json
check "up to the end of the answer's turn" grep -q '"text":"yes",.*"stop":"end"' "$dir/out"
check "on a line of its own" run generate "$dir/ckpt" --chat chatml --prompt "What is 5?" --temperature 0 --tokens 30
check "below the prompt" test "$(cat "$dir/out")" = "What is 5?
yes"

expects="run eval $dir/ckpt"
printf 'What is a dam? %.0s' $(seq 100) >"$dir/plain.txt"
check "what the checkpoint has for conversations is not asked of text" run eval "$dir/ckpt" --data "$dir/plain.txt"
expect 2 "--chat is for JSON lines" "what is asked for is" --data "$dir/plain.txt" --chat auto

# Sequences without a target: none with one is refused, some are said, and a step of such has no loss.
python3 - "$dir" <<'PY'
import json, sys
d = sys.argv[1]
line = lambda *said: json.dumps({"messages": [{"role": r, "content": c} for r, c in said]}) + "\n"
open(d + "/asked.jsonl", "w").write(line(("user", "x " * 200)) * 50)
open(d + "/long.jsonl", "w").write(line(("user", "x " * 200), ("assistant", "yes")) * 50)
open(d + "/weight.jsonl", "w").write("".join(json.dumps({"messages": [{"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "yes", "weight": 0}]}) + "\n" for _ in range(50)))
PY
expects="run train $c --set spillway.checkpoint_dir= --set spillway.steps=3"
expect 1 "training sequences has a target, so nothing would be learned: of conversations only turns of the assistant" "turns of the user alone" --set "data.path=$dir/asked.jsonl"
check "no step is made" test -z "$(grep step "$dir/out")"
expect 1 "so nothing would be learned" "turns without weight" --set "data.path=$dir/weight.jsonl"
expect 1 "so nothing would be learned" "in packed windows" --set "data.path=$dir/asked.jsonl" --set data.documents=packed
sources=(--set "data={\"seq_length\": 32, \"tokenizer\": \"tests/vectors/tok_qwen2.json\", \"chat\": \"auto\", \"sources\": [\"$dir/asked.jsonl\", \"$dir/c.jsonl\"]}")
check "a source of them beside another" run train "$c" --set spillway.checkpoint_dir= --set spillway.steps=1 "${sources[@]}"
check "is said" grep -Eq 'warning: no token has a target in [0-9]+ of [0-9]+ sequences, which teach nothing' "$dir/err"
short=(--set "data.path=$dir/long.jsonl" --set train_micro_batch_size_per_gpu=1)
check "cut conversations" run train "$c" "${short[@]}" --set spillway.checkpoint_dir="$dir/cut" --set spillway.steps=12 --set spillway.run_log="$dir/cut.log"
check "are said to be cut, and how many windows of theirs have nothing" grep -Eq 'no token has a target in [0-9]+ of [0-9]+ sequences.*longer than 32 tokens \(data.seq_length\) were cut, 50 of them' "$dir/err"
cp "$dir/err" "$dir/first"
check "a run that finds them made" run train "$c" "${short[@]}" --set spillway.checkpoint_dir= --set spillway.steps=16 --set spillway.run_log="$dir/cut2.log"
check "says the same" test "$(grep 'no token' "$dir/first")" = "$(grep 'no token' "$dir/err")"
check "of a step without a target there is no loss" grep -q '"loss":null' "$dir/cut.log"
check "nor in what closes the run" grep -Eq 'tokens/s; loss [0-9.]+ -> [0-9.]+$' "$dir/out"
check "of others there is" grep -q '"loss":[0-9]' "$dir/cut.log"
check "going on from there" run train "$c" "${short[@]}" --set spillway.checkpoint_dir= --set spillway.steps=16 --set spillway.run_log="$dir/cut.log" --resume "$dir/cut"
check "gives the losses of a run in one piece" test "$(losses "$dir/cut.log")" = "$(losses "$dir/cut2.log")"
check "evaluation counts what has targets" run eval "$dir/cut" --data "$dir/long.jsonl" --json
check "three of each line" grep -q '"tokens":150,' "$dir/out"

# Conversations that windows cut, where that is asked for.
check "packed conversations" run train "$c" --set data.documents=packed --set spillway.checkpoint_dir="$dir/packed" --set spillway.steps=3
check "nor padded" test ! -s "$dir/err"
check "and are evaluated" run eval "$dir/packed" --data "$dir/c.jsonl" --json
grep -o '"tokens": *[0-9]*' "$dir/out" | grep -o '[0-9]*' >"$dir/count"
check "with as many tokens" test "$(cat "$dir/count")" -eq 600

# Refusals.
expects="run train $c --set spillway.checkpoint_dir= --set spillway.steps=1"
expect 1 "bad.jsonl: line 2 (byte" "an image" --set "data.path=$dir/bad.jsonl"
check "which message and part is said" said "message 1: part 0 of the content is \"image\""
expect 2 "data.chat: chat \"llama3\"" "a layout of another tokenizer" --set data.chat=llama3
check "the token is named" said "has no token <|begin_of_text|>"
expect 1 "bad_tools.jsonl: line 2 (byte" "arguments that are not JSON" --set "data.path=$dir/bad_tools.jsonl"
check "which call is said" said "message 2: tool_calls: call 1: its \"arguments\", which are text: not JSON"
check "tool calls" run train "$c" --set spillway.checkpoint_dir="$dir/tools" --set spillway.steps=1 --set "data.path=$dir/tools.jsonl" --set data.seq_length=256 --set model.max_position_embeddings=256 --set train_micro_batch_size_per_gpu=1
check "are counted" run eval "$dir/tools" --data "$dir/tools.jsonl" --json
grep -o '"tokens": *[0-9]*' "$dir/out" | grep -o '[0-9]*' >"$dir/count"
check "with the answers, in both forms of arguments" test "$(cat "$dir/count")" -eq 54
cp "$dir/c.jsonl" "$dir/c.txt"
expect 2 "data.chat is for JSON lines, and no file of the data holds such: $dir/c.txt is read as text" "conversations in .txt" --set "data.path=$dir/c.txt"
cp "$dir/c.jsonl" "$dir/talks.json"
check "but for .json" run train "$c" --set spillway.checkpoint_dir= --set spillway.steps=1 --set "data.path=$dir/talks.json"
expect 2 "chatml, llama3, mistral" "a layout that is none" --set data.chat=chatlm
expect 2 "needs a tokenizer" "bytes" --set data.tokenizer=bytes
expect 1 "(data.chat, and --chat of eval, are for conversations)" "conversations without a layout" --set data.chat=
echo '{"prompt": "a", "chosen": "b", "rejected": "c"}' >"$dir/pair.jsonl"
echo '{"prompt": "a", "completion": "b"}' >"$dir/asked.jsonl"
expect 1 "(spillway.preference.loss is for training on pairs of answers)" "pairs without a loss for them" --set data.path="$dir/pair.jsonl" --set data.chat=
expect 1 "(data.prompt_field prompt and data.text_field completion read both)" "prompts and completions" --set data.path="$dir/asked.jsonl" --set data.chat=
expects="run"
expect 1 "(data.chat, and --chat of eval, are for conversations)" "conversations in a format without loss" tokenize "$dir/c.jsonl" --tokenizer tests/vectors/tok_qwen2.json -o "$dir/c.bin"
expect 2 "--ids" "an answer in numbers" generate "$dir/ckpt" --chat auto --ids --prompt 5
# The configurations that README begins with: in full and by adapters, from a folder to a folder.
for example in finetune lora; do
    set -- examples/$example.json --set model.path="$dir/ckpt/step-20" --set data.path="$dir/c.jsonl" --set spillway.checkpoint_dir="$dir/$example" --set spillway.run_log="$dir/$example.log"
    check "examples/$example.json plans for a GPU that is not here" run plan "$@" --set data.seq_length=64 --gpu rtx4090 --no-measure --json
    check "which does everything it says" sh -c "! grep -q warning '$dir/err' && grep -q '\"fits\": true' '$dir/out'"
    check "trains" run train "$@" --set data.seq_length=32 --set train_micro_batch_size_per_gpu=2 --set gradient_accumulation_steps=1 --set spillway.steps=3 --set spillway.device=cpu
    check "by a small loss, for it begins with what was trained" awk -F'[:,]' '/"step":3,/ { for (i = 1; i < NF; i++) if ($i == "\"loss\"") loss = $(i + 1) } END { exit !(loss != "" && loss < 0.2) }' "$dir/$example.log"
    check "is exported" run export "$dir/$example" --to "$dir/$example-folder"
    check "and answers" run generate "$dir/$example-folder" --chat auto --prompt "What is 5?" --temperature 0 --tokens 30
    check "as it was taught" test "$(tail -n 1 "$dir/out")" = yes
done
# And what goes on from there, with answers that are preferred to those.
set -- examples/preference.json --set model.path="$dir/ckpt/step-20" --set data.path="$dir/pairs.jsonl" --set spillway.checkpoint_dir="$dir/preference" --set spillway.run_log="$dir/preference.log"
check "examples/preference.json plans for a GPU that is not here" run plan "$@" --set data.seq_length=64 --gpu rtx4090 --no-measure --json
check "which does everything it says, too" sh -c "! grep -q warning '$dir/err' && grep -q '\"fits\": true' '$dir/out' && grep -q '\"reference\"' '$dir/out'"
check "trains" run train "$@" --set data.seq_length=64 --set train_micro_batch_size_per_gpu=2 --set gradient_accumulation_steps=2 --set spillway.steps=60 --set spillway.device=cpu --set optimizer.params.lr=0.005 --set spillway.preference.likelihood=1
check "until the other answer is right" python3 -c 'import json, sys; r = [json.loads(l) for l in open(sys.argv[1]) if "\"loss\"" in l]; sys.exit(0 if len(r) == 60 and r[0]["preferred"]["chosen"] == 0 and r[-1]["preferred"]["right"] == 1 and r[-1]["preferred"]["chosen"] > 0 else 1)' "$dir/preference.log"
check "is exported" run export "$dir/preference" --to "$dir/preference-folder"
check "and answers" run generate "$dir/preference-folder" --chat auto --prompt "What is 5?" --temperature 0 --tokens 30
check "as was preferred" test "$(tail -n 1 "$dir/out")" = no
echo "1..$n"
