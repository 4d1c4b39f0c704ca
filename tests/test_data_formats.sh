#!/bin/bash
# Training on every format of data: the same tokens in text, llm.c's streams, Megatron's datasets and JSON lines give the same
# losses; weights, masks and resuming at the command line; what is refused, by name. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-data-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
small=(--set model.n_embd=64 --set model.n_layer=2 --set model.n_head=4 --set data.seq_length=32 --set data.format=auto
    --set train_micro_batch_size_per_gpu=2 --set spillway.steps=5 --set spillway.eval_interval=5 --set spillway.chunk_elems=16384
    --set spillway.host_memory=auto --set spillway.device_memory=auto --set spillway.checkpoint_dir=
    --set zero_optimization.offload_param.nvme_path="$dir/swap" --set zero_optimization.offload_optimizer.nvme_path="$dir/swap")
train() { # LOG ARGS...
    local log=$1
    shift
    run train examples/demo.json "${small[@]}" --set spillway.run_log="$dir/$log" "$@"
}
expects="train refused.jsonl"
losses() { grep -o '"step":[0-9]*,"loss":[^,]*\|"eval_loss":[^,}]*' "$1"; }
same() { [ "$(losses "$dir/$1")" = "$(losses "$dir/$2")" ] && [ "$(losses "$dir/$1" | wc -l)" -ge 5 ]; }

mkdir "$dir/swap"
python3 - "$dir" <<'PY'
import json, struct, sys
d = sys.argv[1]
lines = ["line %d says that %d times %d is %d" % (i, i, i % 7, i * (i % 7)) for i in range(600)]
text = ("\n".join(lines) + "\n").encode()
open(d + "/text.txt", "wb").write(text)
zeros = b"\0" * 1012
open(d + "/a.bin", "wb").write(struct.pack("<3i", 20240520, 1, len(text)) + zeros + struct.pack("<%dH" % len(text), *text))
open(d + "/b.bin", "wb").write(struct.pack("<3i", 20240801, 7, len(text)) + zeros + struct.pack("<%dI" % len(text), *text))
open(d + "/m.bin", "wb").write(struct.pack("<%di" % len(text), *text))
sizes = [len(l) + 1 for l in lines]
offsets = [4 * sum(sizes[:i]) for i in range(len(sizes))]
open(d + "/m.idx", "wb").write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(sizes), len(sizes) + 1) +
    struct.pack("<%di" % len(sizes), *sizes) + struct.pack("<%dq" % len(sizes), *offsets) +
    struct.pack("<%dq" % (len(sizes) + 1), *range(len(sizes) + 1)))
open(d + "/l.jsonl", "w").write("".join(json.dumps({"id": i, "text": l}) + "\n" for i, l in enumerate(lines)))
open(d + "/i.jsonl", "w").write("".join(json.dumps({"input_ids": list((l + "\n").encode()), "id": i}) + "\n" for i, l in enumerate(lines)))
open(d + "/b.jsonl", "w").write("".join(json.dumps({"input_ids": (ids := list((l + "\n").encode())), "labels": [-100] * (len(l) // 2) + ids[len(l) // 2:]}) + "\n" for l in lines))
open(d + "/p.jsonl", "w").write("".join(json.dumps({"prompt": l[:len(l) // 2], "completion": l[len(l) // 2:]}) + "\n" for l in lines))
open(d + "/large.bin", "wb").write(struct.pack("<3i", 20240520, 1, 5000) + zeros + struct.pack("<5000H", *([7] * 4000 + [700] * 1000)))
open(d + "/cut.bin", "wb").write(struct.pack("<3i", 20240520, 1, 5000) + zeros + b"\0" * 300)
PY

check "text" train text.log --set "data.path=$dir/text.txt"
check "is said" grep -q "^data .*1 file(s) (text), " "$dir/out"
for kind in "a.bin|llm.c u16" "b.bin|llm.c u32" "m|megatron i32" "m.idx|megatron i32" "l.jsonl|jsonl"; do
    given=${kind%|*}
    check "${kind#*|} as $given" train "$given.log" --set "data.path=$dir/$given"
    check "is said" grep -qF "1 file(s) (${kind#*|}), " "$dir/out"
    check "and gives the losses of the text" same text.log "$given.log"
done
check "tokens of a small vocabulary" train small.log --set "data.path=$dir/a.bin" --set model.vocab_size=128
check "are no reason for a warning" test ! -s "$dir/err"
cached() { ls "$dir"/cache/spillway/tokens/*.tokens 2>/dev/null | wc -l; }
check "JSON lines are in the cache" test "$(cached)" -eq 1
check "a second run" train l2.log --set "data.path=$dir/l.jsonl"
check "finds them" test "$(cached)" -eq 1
check "and gives the same losses" same text.log l2.log
check "JSON lines in a cache of one's own" train l3.log --set "data.path=$dir/l.jsonl" --set "data.cache_dir=$dir/mine"
check "are there" test -n "$(ls "$dir/mine")"
check "a plan opens them too" run plan examples/demo.json "${small[@]}" --set "data.path=$dir/l.jsonl" --no-measure
check "without a warning" test ! -s "$dir/err"

# A prompt gives no loss: less is lost over as many positions.
check "prompt and completion" train p.log --set "data.path=$dir/p.jsonl" --set data.prompt_field=prompt --set data.text_field=completion
check "losses differ" test "$(losses "$dir/p.log")" != "$(losses "$dir/text.log")"

# Lines that hold tokens: the same ones as the text's bytes, and labels that hide what a prompt hides; whatever tokenizer the model's folder has.
check "lines of tokens" train i.log --set "data.path=$dir/i.jsonl" --set data.text_field=input_ids
check "give the losses of the text" same text.log i.log
check "with labels" train b.log --set "data.path=$dir/b.jsonl" --set data.text_field=input_ids
check "of those behind a prompt" same p.log b.log
expect 1 "it has \"input_ids\", \"labels\" (data.text_field input_ids" "text where there are tokens" --set "data.path=$dir/b.jsonl"
check "which a plan counts" run plan examples/demo.json "${small[@]}" --set "data.path=$dir/b.jsonl" --set data.text_field=input_ids --no-measure
check "a model" train f.log --set "data.path=$dir/text.txt" --set spillway.checkpoint_dir="$dir/folder" --set spillway.steps=1
check "in a folder" run export "$dir/folder" --to "$dir/hf"
echo '{}' >"$dir/hf/tokenizer_config.json"
check "with a tokenizer that is not read" train h.log --set "model={\"path\": \"$dir/hf\"}" --set "data.path=$dir/i.jsonl" --set data.text_field=input_ids --set data.tokenizer=auto
check "needs none for tokens" test ! -s "$dir/err"
expect 2 "data.text_field names lists of tokens" "text there" --set "model={\"path\": \"$dir/hf\"}" --set "data.path=$dir/l.jsonl" --set data.tokenizer=auto
check "masked documents" train k.log --set "data.path=$dir/m" --set data.documents=mask
check "losses differ" test "$(losses "$dir/k.log")" != "$(losses "$dir/text.log")"
check "separate documents" train a.log --set "data.path=$dir/m" --set data.documents=separate
check "losses differ again" test "$(losses "$dir/a.log")" != "$(losses "$dir/k.log")"
check "whole documents" train w.log --set "data.path=$dir/l.jsonl" --set data.documents=whole
check "are said to be padded" grep -Eq 'l.jsonl: [0-9]+ documents in [0-9]+ windows of 32 tokens, [0-9.]+% of them padding' "$dir/err"
check "which may be of one token" train w1.log --set "data.path=$dir/l.jsonl" --set data.documents=whole --set data.seq_length=1
check "and are counted" grep -qF "l.jsonl: 600 documents in $(wc -c <"$dir/text.txt") windows of 1 tokens, 0.0% of them" "$dir/err"
check "and files of tokens not to be" train w2.log --set "data.path=$dir/m" --set data.documents=whole
check "whole" grep -q 'windows cut documents of megatron tokens' "$dir/err"
check "and are separate" same a.log w2.log

# Sources by weight; a run that is cut in two sees the same sequences.
sources="data.sources=[{\"path\": \"$dir/a.bin\", \"weight\": 0.7}, {\"path\": \"$dir/[lp].jsonl\", \"weight\": 0.2}, \"$dir/m\"]"
mixed=(--set 'data={"seed": 1, "validation_split": 0.05, "text_field": "text"}' --set data.seq_length=32 --set "$sources")
sed -i 's/"completion"/"text"/' "$dir/p.jsonl"
check "three sources" train s.log "${mixed[@]}" --set spillway.steps=6
check "of four files" grep -qF "4 file(s) (1 llm.c u16, 2 jsonl, 1 megatron i32), " "$dir/out"
check "three steps" train s3.log "${mixed[@]}" --set spillway.steps=3 --set spillway.checkpoint_dir="$dir/out3"
check "and three more" train s3.log "${mixed[@]}" --set spillway.steps=6 --set spillway.checkpoint_dir="$dir/out3" --resume "$dir/out3"
steps() { grep -o '"step":[0-9]*,"loss":[^,]*' "$dir/$1"; }
check "are the six" test "$(steps s.log)" = "$(steps s3.log)"

# Refusals.
expect 1 "large.bin: token 700 at position" "a token outside the vocabulary" --set "data.path=$dir/large.bin" --set spillway.steps=200
expect 1 "cut.bin: token count at offset 8 is 5000" "a truncated file" --set "data.path=$dir/cut.bin"
cp "$dir/text.txt" "$dir/text.bin"
expect 1 "magic at offset 0" "text named .bin" --set "data.path=$dir/text.bin"
check "on request" train f.log --set "data.path=$dir/text.bin" --set data.format=text
check "it is text" same text.log f.log
expect 1 "line 1 (byte 0): no field \"body\"; it has \"id\", \"text\"" "JSON lines without the field" --set "data.path=$dir/l.jsonl" --set data.text_field=body
expect 2 "data.path and data.sources" "path and sources" --set "$sources"
expect 2 "number above 0" "a weight of 0" --set 'data={"seq_length": 32}' --set 'data.sources=[{"path": "x", "weight": 0}]'
expect 2 "unknown member \"bytes\"" "a source with bytes" --set 'data={"seq_length": 32}' --set 'data.sources=[{"path": "x", "bytes": 5000}]'
expect 2 "data.documents" "another word for documents" --set data.documents=apart
expect 2 "data.text_field" "text and prompt in one field" --set data.prompt_field=text

# A byte order mark is no part of a configuration.
{ printf '\357\273\277'; cat examples/demo.json; } >"$dir/mark.json"
check "a configuration behind a byte order mark" run plan "$dir/mark.json" "${small[@]}" --set "data.path=$dir/l.jsonl" --no-measure

# JSON lines by another name: read where they are .json, said where they are not, and not passed over where settings are for them.
cp "$dir/l.jsonl" "$dir/l.json"
cp "$dir/l.jsonl" "$dir/l.txt"
check "JSON lines in .json" train j.log --set "data.path=$dir/l.json"
check "give their losses" same text.log j.log
check "JSON lines in .txt are text" train t.log --set "data.path=$dir/l.txt"
check "with a warning" grep -q 'warning: data: .*/l.txt is read as text.*has "text".*\.jsonl, or data.format' "$dir/err"
check "of one file" test "$(grep -c warning "$dir/err")" -eq 1
check "and lines on request" train t2.log --set "data.path=$dir/l.txt" --set data.format=jsonl
check "without it" test -z "$(grep warning "$dir/err")"
check "and with their losses" same text.log t2.log
for key in data.prompt_field data.text_field; do
    expect 2 "$key is for JSON lines, and no file of the data holds such: $dir/text.txt is read as text" "$key without JSON lines" --set "data.path=$dir/text.txt" --set $key=body
done
python3 -c 'import sys; print("[" + ",\n".join(open(sys.argv[1]).read().splitlines()) + "]")' "$dir/l.jsonl" >"$dir/array.json"
expect 1 "jq -c '.[]' $dir/array.json >$dir/array.jsonl" "a JSON array" --set "data.path=$dir/array.json"
check "a model for evaluation" train e.log --set "data.path=$dir/text.txt" --set spillway.checkpoint_dir="$dir/model"
expects="run eval $dir/model"
check "evaluated on lines in .json" run eval "$dir/model" --data "$dir/l.json"
cp "$dir/out" "$dir/lines"
check "as on those in .jsonl" run eval "$dir/model" --data "$dir/l.jsonl"
check "with the same loss" test "$(cut -d' ' -f1-6 "$dir/out")" = "$(cut -d' ' -f1-6 "$dir/lines")"
expect 1 "jq -c '.[]'" "evaluation on an array" --data "$dir/array.json"
expect 2 "--text-field is for JSON lines" "a field of text" --data "$dir/text.txt" --text-field body
echo "1..$n"
