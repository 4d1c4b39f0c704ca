#!/bin/bash
# spillway generate and eval: checkpoints and folders, many prompts, budgets and nvme, tokenizers, and what is refused. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-generate-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
same() { cmp -s "$dir/$1" "$dir/out"; }
quiet() { [ "$(grep -cv " tokens/s" "$dir/err")" -eq 0 ]; } # but for how fast it was
said() { grep -qF -- "$1" "$dir/err" && [ ! -s "$dir/out" ]; } # and nothing but the message
f=tests/vectors/families
mkdir "$dir/swap" "$dir/data"
for i in $(seq 400); do echo "line $i of a text that says little, $((i * 7)) times"; done >"$dir/data/text"
cat >"$dir/c.json" <<EOF
{"model": {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64},
 "data": {"path": ["$dir/data/text"], "seq_length": 32}, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true},
 "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
 "spillway": {"steps": 30, "seed": 1, "device": "cpu", "checkpoint_dir": "$dir/ckpt", "chunk_elems": 8192}}
EOF
check "a model is trained" run train "$dir/c.json" --quiet
c=$dir/ckpt

# Checkpoints.
check "a checkpoint goes on from a prompt" run generate "$c" --prompt "line " --tokens 20 --temperature 0
cp "$dir/out" "$dir/greedy"
check "the prompt comes first" test "$(head -c 5 "$dir/out")" = "line "
check "then as many bytes and a line's end" test "$(wc -c <"$dir/out")" -eq 26
run generate "$c" --prompt "line " --tokens 20 --temperature 0 --seed 5
check "greedy does not depend on the seed" same greedy
run generate "$c" --prompt "line " --tokens 20 --top-k 1
check "nor does drawing from one" same greedy
run generate "$c" --prompt "line " --tokens 20 --top-p 0.000001
check "nor from the smallest nucleus" same greedy
run generate "$c/step-30" --prompt "line " --tokens 20 --temperature 0
check "a checkpoint by its own name" same greedy
run generate "$c" --prompt "line " --tokens 40 --temperature 1.5 --seed 1
cp "$dir/out" "$dir/seed1"
run generate "$c" --prompt "line " --tokens 40 --temperature 1.5 --seed 1
check "a seed gives the same text" same seed1
run generate "$c" --prompt "line " --tokens 40 --temperature 1.5 --seed 2
check "another one another text" test "$(cat "$dir/out")" != "$(cat "$dir/seed1")"
run generate "$c" --prompt "line " --tokens 0
check "no tokens: the prompt" test "$(cat "$dir/out")" = "line "
run generate "$c" --prompt "line " --tokens 200 --temperature 0
check "a text longer than the positions goes on" test "$(wc -c <"$dir/out")" -eq 206
check "and says so once" test "$(grep -c "the model's 64 positions: it goes on from its last 32 tokens" "$dir/err")" -eq 1
run generate "$c" --prompt "line " --tokens 59 --temperature 0
check "one that fits says nothing" quiet
# Where it starts again it is a prompt of its own: token for token what the last 32 tokens give, three times over.
restarts() { # MODEL PROMPT, of five tokens
    run generate "$1" --prompt "$2" --ids --json --tokens 150 --temperature 0
    python3 - "$spw" "$1" "$dir/out" "$2" <<'PY'
import json, subprocess, sys
o = json.load(open(sys.argv[3]))
ids = [int(n) for n in sys.argv[4].split(",")] + o["tokens"]
if o.get("restarts") != 3 or len(ids) != 155:
    sys.exit("restarts: %s, %d tokens" % (o.get("restarts"), len(ids)))
for end in (65, 98, 131):  # 64 are fed and one is drawn, then 32 and 33 more
    prompt, want = ids[end - 32:end], ids[end:end + 33]
    out = subprocess.run([sys.argv[1], "generate", sys.argv[2], "--prompt", ",".join(map(str, prompt)), "--ids", "--json", "--tokens",
                          str(len(want)), "--temperature", "0"], capture_output=True, text=True, check=True)
    got = json.loads(out.stdout)["tokens"]
    if got != want:
        sys.exit("after token %d: %s, wanted %s" % (end, got, want))
PY
}
check "from where the last half of the positions is the prompt" restarts "$c" 108,105,110,101,32
cp -r "$f/qwen3_5" "$dir/linear"
sed -i 's/"eos_token_id": 2/"eos_token_id": null/' "$dir/linear/config.json"
check "linear attention has nothing left of what was before, either" restarts "$dir/linear" 36,6,19,39,37

# Placement changes nothing, and leaves nothing.
for o in "--nvme $dir/swap" "--nvme $dir/swap --host-memory 64MiB" "--nvme $dir/swap --device-memory 2MiB" "--device-memory 2MiB"; do
    run generate "$c" --prompt "line " --tokens 40 --temperature 1.5 --seed 1 $o
    check "the same text with ${o//"$dir"/DIR}" same seed1
done
check "no swap file is left" test -z "$(ls -A "$dir/swap")"
# A signal while weights come, or later, ends it with nothing left.
"$spw" generate "$c" --prompt "line " --tokens 100000 --nvme "$dir/swap" >"$dir/out" 2>"$dir/err" &
pid=$!
comes sh -c "[ -n \"\$(ls '$dir/swap')\" ]"
kill -INT $pid
wait $pid
check "a signal ends generation with 1" test $? -eq 1
check "and leaves no swap file" test -z "$(ls -A "$dir/swap")"
expect 3 "spillway.device_memory" "a device that is too small" generate "$c" --prompt a --device-memory 64KiB
expect 3 "spillway.host_memory" "host memory that is too small" generate "$c" --prompt a --host-memory 64KiB
expect 1 "$dir/none" "a swap folder that is not there" generate "$c" --prompt a --nvme "$dir/none"

# Many prompts: each as if it were alone, in their order, more of them than slots.
: >"$dir/each"
printf '\357\273\277' >"$dir/prompts" # a byte order mark, which is no part of the first
for i in $(seq 20); do
    p="line $i$(printf '%*s' $((i % 7)) '' | tr ' ' x)"
    echo "$p" >>"$dir/prompts"
    run generate "$c" --prompt "$p" --tokens $((10 + 5)) --temperature 1 --json
    cat "$dir/out" >>"$dir/each"
done
echo >>"$dir/prompts"
run generate "$c" --prompts "$dir/prompts" --tokens 15 --temperature 1 --json
check "20 prompts give what each gives alone" same each
check "and how fast is said" grep -q "spillway: 300 tokens in .* tokens/s, 16 texts at once$" "$dir/err"
for n in 1 7 64; do
    run generate "$c" --prompts "$dir/prompts" --tokens 15 --temperature 1 --json --batch-size $n
    check "the same with $n at once" same each
done
run generate "$c" --prompts - --tokens 15 --temperature 1 --json < <(tail -c +4 "$dir/prompts")
check "the same from stdin" same each
expect 2 "stdin has a zero byte" "a zero byte in stdin" generate "$c" --prompts - --tokens 1 < <(printf 'a\0b')
expect 2 "stdin has nothing" "nothing in stdin" generate "$c" --prompts - </dev/null
expect 2 "--batch-size 0 is not a number from 1 to 4096" "no text at once" generate "$c" --prompt x --batch-size 0
printf 'line 1\nline\0 2\nline 3\n' >"$dir/zero"
expect 1 "$dir/zero, line 2: a zero byte" "a zero byte in the prompts is said" generate "$c" --prompts "$dir/zero" --tokens 1
printf '%s\0' "$(cat "$dir/c.json")" >"$dir/zero.json"
expect 2 "$dir/zero.json, line 5: a zero byte" "and in a configuration" train "$dir/zero.json"
run generate "$c" --prompt "line 1" --prompt "a" --tokens 5 --temperature 0
check "texts of several prompts are told apart" test "$(grep -c '^--- [12]$' "$dir/out")" -eq 2
run generate "$c" --prompt $'Gr\xc3\xb6\xc3\x9fe \xf0\x9f\x98\x80 \xc0\x80\xff \xe2\x82' --tokens 1 --json
check "bytes that are not UTF-8 are replaced in JSON, they alone" \
    grep -qF '"prompt":"Größe 😀 ��� ��"' "$dir/out"

# Folders: one file, shards, another dtype; a cut by the end token; tokens as numbers.
for name in gpt2 llama3 mistral qwen2_window qwen3 gemma4_dense gemma4_moe; do
    grep "^$name " tests/vectors/generate.txt | while read -r _ line; do
        prompt=$(echo "${line% |*}" | tr ' ' ,) want=$(echo "${line#*| }" | tr ' ' ,)
        run generate "$f/$name" --ids --prompt "$prompt" --tokens 5 --temperature 0 || echo bad
        got=$(cat "$dir/out")
        # An end token of 2 stops earlier than transformers was told to.
        case "$prompt,$want," in "$got",*) ;; *) echo "$got, not $prompt,$want" ;; esac
    done >"$dir/wrong"
    check "$name draws what transformers draws" test ! -s "$dir/wrong"
done
run generate "$f/mistral" --ids --prompt 5,7,1,30,2,8 --tokens 14 --temperature 0 --json
check "the end-of-text token ends a text" grep -q '"tokens":\[17,20\],"stop":"end"' "$dir/out"
cp -r "$f/mistral" "$dir/ends"
echo "{\"eos_token_id\": [$(seq -s , 21 40),20]}" >"$dir/ends/generation_config.json"
run generate "$dir/ends" --ids --prompt 5,7,1,30,2,8 --tokens 14 --temperature 0 --json
check "so does each of a long list" grep -q '"tokens":\[17\],"stop":"end"' "$dir/out"
echo "{\"eos_token_id\": [$(yes 40 | head -n 65 | paste -sd ,)]}" >"$dir/ends/generation_config.json"
expect 1 "$dir/ends/generation_config.json: eos_token_id has more than 64 tokens" "which has an end" generate "$dir/ends" --ids --prompt 5
run generate "$f/qwen3" --ids --prompt "5 7" --tokens 3 --temperature 0 --json
check "else the number of tokens does" grep -q '"stop":"tokens"' "$dir/out"
run generate "$f/phi3_long" --ids --prompt 10,4 --prompt 5 --tokens 10 --temperature 0
check "longrope within the original 12 positions says nothing" quiet
run generate "$f/phi3_long" --ids --prompt 10,4 --prompt 5 --tokens 11 --temperature 0
check "beyond them all texts are by the long factors, and that is said" grep -q "can come to 13 tokens, more than the model's original 12: every text" "$dir/err"
expect 1 "tokenizer.json" "a folder without a tokenizer, with words" generate "$f/llama" --prompt hello
expect 1 "not a list of token numbers" "words for numbers" generate "$f/llama" --ids --prompt "5,x"
expect 1 "outside the vocabulary of 41" "a number that is no token" generate "$f/llama" --ids --prompt "5,41"
expect 1 "prompt 2 has 25 tokens, the model has 24 positions" "a prompt longer than the positions" \
    generate "$f/gpt2" --ids --prompt 1 --prompt "$(seq -s , 25)"
cp -r "$f/llama" "$dir/tok"
cp tests/vectors/tok_gpt2.json "$dir/tok/tokenizer.json"
expect 1 "has tokens up to 1199, the model a vocabulary of 41" "a tokenizer of a larger vocabulary" generate "$dir/tok" --prompt hello

# A tokenizer of its own: the small one that the tokenizer tests have.
python3 - "$dir" <<'PY'
import json, sys
d = sys.argv[1]
t = json.load(open("tests/vectors/tok_gpt2.json"))
size = max(max(t["model"]["vocab"].values()), *[a["id"] for a in t.get("added_tokens", [])] or [0]) + 1
json.dump({"model": {"model_type": "gpt2", "vocab_size": size, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2},
           "data": {"path": [d + "/data/t.bin"], "seq_length": 32}, "train_micro_batch_size_per_gpu": 2,
           "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
           "spillway": {"steps": 2, "device": "cpu", "checkpoint_dir": d + "/words"}}, open(d + "/w.json", "w"))
PY
check "text becomes tokens" run tokenize "$dir/data/text" --tokenizer tests/vectors/tok_gpt2.json -o "$dir/data/t.bin"
check "a model of words is trained" run train "$dir/w.json" --quiet
expect 1 "tokenizer.json" "its checkpoint has no tokenizer" generate "$dir/words" --prompt "line 7"
check "one is named" run generate "$dir/words" --prompt "line 7" --tokens 8 --temperature 0 --tokenizer tests/vectors/tok_gpt2.json
check "and the prompt comes back" test "$(head -c 6 "$dir/out")" = "line 7"
cp -r "$dir/words/step-2" "$dir/words2"
cp tests/vectors/tok_gpt2.json "$dir/words2/tokenizer.json"
cp "$dir/out" "$dir/words.out"
run generate "$dir/words2" --prompt "line 7" --tokens 8 --temperature 0
check "or lies beside the weights" same words.out
# Tokens that were added beyond the model's vocabulary (an image's place, say) do not matter until a text has one.
python3 - "$dir" <<'PY'
import json, sys
d = sys.argv[1]
t = json.load(open("tests/vectors/tok_gpt2.json"))
t["added_tokens"].append({"id": 1201, "content": "<image>", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": False})
json.dump(t, open(d + "/words2/tokenizer.json", "w"))
json.dump({**json.load(open(d + "/w.json")), "data": {"path": d + "/data/text", "seq_length": 32, "tokenizer": d + "/words2"}},
          open(d + "/w2.json", "w"))
t["model"]["vocab"]["uncommon"] = 1201
t["added_tokens"].pop()
json.dump(t, open(d + "/data/larger.json", "w"))
PY
run generate "$dir/words2" --prompt "line 7" --tokens 8 --temperature 0
check "a tokenizer with an added token beyond the model's vocabulary" same words.out
expect 1 "prompt 2: token 1201 is outside the vocabulary of 1201" "which no prompt may have" \
    generate "$dir/words2" --prompt "line 7" --prompt "an <image>"
check "eval takes it" run eval "$dir/words2" --data "$dir/data/text"
check "plan too" run plan "$dir/w2.json"
check "and train" run train "$dir/w2.json" --set spillway.checkpoint_dir="$dir/words3" --quiet
other="is not the one that made what"
check "its checkpoint has that tokenizer" run generate "$dir/words3" --prompt "line 7" --tokens 2
check "of which nothing is to be said" quiet
check "another one is taken" run generate "$dir/words3" --prompt "line 7" --tokens 2 --tokenizer tests/vectors/tok_gpt2.json
check "with a warning" grep -qF -- "$other $dir/words3" "$dir/err"
{ cat "$dir/data/text"; echo "an <image>"; } >"$dir/data/image"
expect 1 "token 1201 is outside the vocabulary of 1201" "but not in the data" train "$dir/w2.json" --set data.path="$dir/data/image" \
    --set spillway.checkpoint_dir="$dir/words3"
expect 1 "has tokens up to 1201, the model a vocabulary of 1201" "a token of its own beyond it" generate "$dir/words" --prompt a \
    --tokenizer "$dir/data/larger.json"
expect 2 "has tokens up to 1201, the model's vocab_size is 1201" "in training too" train "$dir/w2.json" \
    --set data.tokenizer="$dir/data/larger.json"
check "eval reads token files without one" run eval "$dir/words" --data "$dir/data/t.bin"
cp "$dir/out" "$dir/words.eval"
expect 1 "tokenizer.json" "but no text" eval "$dir/words" --data "$dir/data/text"
check "which it does with one" run eval "$dir/words" --data "$dir/data/text" --tokenizer tests/vectors/tok_gpt2.json --json

# Evaluation.
check "eval of a checkpoint" run eval "$c" --data "$dir/data/text" --json
cp "$dir/out" "$dir/eval"
python3 - "$dir/eval" "$(wc -c <"$dir/data/text")" <<'PY' >"$dir/err" 2>&1
import json, math, sys
o = json.load(open(sys.argv[1]))
windows = (int(sys.argv[2]) - 1) // 32
assert o["sequences"] == windows and o["tokens"] == 32 * windows and o["seq_length"] == 32, o
assert abs(o["perplexity"] - math.exp(o["loss"])) < 1e-9 * o["perplexity"] and 0.5 < o["loss"] < 5, o
PY
check "counts every token of every window" test $? -eq 0
loss() { python3 -c 'import json, sys; print("%.6f" % json.load(open(sys.argv[1]))["loss"])' "$1"; }
want=$(loss "$dir/eval")
for o in "--batch-size 1" "--batch-size 7" "--nvme $dir/swap" "--nvme $dir/swap --device-memory 2MiB" "--batches 100000"; do
    run eval "$c" --data "$dir/data/text" --json $o
    check "the same loss with ${o//"$dir"/DIR}" test "$(loss "$dir/out")" = "$want"
done
run eval "$c" --data "$dir/data/text" --batches 2 --batch-size 3 --json
check "batches are counted" grep -q '"sequences":6,' "$dir/out"
run eval "$c" --data "$dir/data/text" --seq-length 16
check "one line for people" test "$(wc -l <"$dir/out")" -eq 1 -a -n "$(grep -E '^loss [0-9.]+  perplexity [0-9.]+  [0-9]+ tokens in [0-9]+ sequences of 16' "$dir/out")"
python3 -c 'for i in range(99): print("{\"text\": \"line %d of a text\"}" % i)' >"$dir/data/l.jsonl"
check "eval of JSON lines" run eval "$c" --data "$dir/data/l.jsonl" "$dir/data/text"
expect 1 "$dir/data/none" "data that is not there" eval "$c" --data "$dir/data/none"
expect 2 "64 positions" "sequences longer than the positions" eval "$c" --data "$dir/data/text" --seq-length 65
expect 2 "--format" "an unknown format" eval "$c" --data "$dir/data/text" --format csv

# Wrong arguments.
for a in "generate" "generate $c" "generate --prompt a" "generate $c $c --prompt a" "generate $c --prompt a --tokens x" \
    "generate $c --prompt a --temperature -1" "generate $c --prompt a --temperature nan" "generate $c --prompt a --top-p 0" \
    "generate $c --prompt a --top-p 1.5" "generate $c --prompt a --top-k -3" "generate $c --prompt a --tokens 1000001" \
    "generate $c --prompt a --host-memory lots" "generate $c --prompt a --device-memory 0" "generate $c --prompt a --cache" \
    "generate $c --prompt" "eval" "eval $c" "eval --data a" "eval $c --data" "eval $c --data a --batches 0" \
    "eval $c --data a --seq-length x" "eval $c $c --data a" "eval $c --data a --what"; do
    expect 2 "spillway ${a%% *}: " "refused: ${a//"$dir"/DIR}" $a
done
expect 2 "is empty" "an empty prompt" generate "$c" --prompt ""
expect 1 "$dir/none" "no such folder" generate "$dir/none" --prompt a
expect 1 "no complete checkpoint" "a folder with nothing" generate "$dir/swap" --prompt a
expect 1 "$dir/none" "no such file of prompts" generate "$c" --prompts "$dir/none"
cp -r "$f/llama" "$dir/hurt"
truncate -s -100 "$dir/hurt/model.safetensors"
expect 1 "model.safetensors" "a damaged folder" generate "$dir/hurt" --ids --prompt 1
echo '{"eos_token_id": ' >"$dir/tok/generation_config.json"
expect 1 "generation_config.json" "a damaged generation_config.json" generate "$dir/tok" --ids --prompt 1
for h in generate eval; do check "help $h" run help $h; done
check "no swap file is left at the end" test -z "$(ls -A "$dir/swap")"
echo "1..$n"
