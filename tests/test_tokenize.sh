#!/bin/bash
# spillway tokenize: what the file holds, byte for byte, for every number of threads; errors by name; nothing left behind. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-tokenize-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
run() { timeout -s KILL 120 "$spw" "$@" >"$dir/out" 2>"$dir/err"; }
gpt2=tests/vectors/tok_gpt2.json
tokenize() { run tokenize "$@" --tokenizer "$gpt2" -o "$dir/out.bin"; }
# refuse EXIT TEXT NAME ARGS...: fails so, says so, and the old output stays as it is, alone.
refuse() {
    local want=$1 text=$2 name=$3
    shift 3
    echo old >"$dir/out.bin"
    run "$@"
    local got=$?
    if [ $got -eq "$want" ] && grep -qF -- "$text" "$dir/err" && [ "$(cat "$dir/out.bin")" = old ] && [ -z "$(find "$dir" -name '*.tmp-*')" ]; then
        ok "$name"
    else
        echo "# exit $got, wanted $want; message should hold: $text"
        bad "$name"
    fi
}

# Inputs: small files, an empty one, one of several pieces, and the same documents as lines.
python3 - "$dir" <<'PY'
import json, random, sys
d = sys.argv[1]
draw = random.Random(1)
text = open("tests/vectors/tok_text.txt", "rb").read()
words = text.split()
big = b""
while len(big) < 3 << 20:
    big += b" ".join(draw.choice(words) for _ in range(40)) + draw.choice([b"\n", b"\r\n", b"\n\n", b" word\n", b""])
for name, data in (("a", b"Hello water\n"), ("b", text), ("empty", b""), ("big", big), ("raw", draw.randbytes(200000)),
                   ("long", b"x" * 2500000), ("end", b"a<|endoftext|>b")):
    open(d + "/" + name + ".txt", "wb").write(data)
docs = ["Hello water\n", "", "zero \0 byte", "caf\u00e9 \U0001f30a", text.decode()]
open(d + "/docs.jsonl", "w").write("".join(json.dumps({"id": i, "text": t, "body": t[::-1]}) + "\n" for i, t in enumerate(docs)) + "\n  \r\n" + json.dumps({"text": "last"}))
open(d + "/many.jsonl", "w").write("".join(json.dumps({"text": "line %d " % i + "water " * (i % 50)}) + "\n" for i in range(20000)))
for i, t in enumerate(docs + ["last"]):
    open(d + "/doc%d.txt" % i, "wb").write(t.encode())
PY
# Reads OUT.bin back: header, and the tokens of every document against their bytes. holds FORMAT FILES...
cat >"$dir/holds.py" <<'PY'
import json, struct, sys
file, form, names = sys.argv[1], sys.argv[2], sys.argv[3:]
data = open(file, "rb").read()
head = struct.unpack("<256i", data[:1024])
size = 2 if form == "uint16" else 4
assert head[:2] == ((20240520, 1) if size == 2 else (20240801, 7)), head[:3]
assert not any(head[3:]) and len(data) == 1024 + size * head[2], (head[2], len(data))
ids = struct.unpack("<%d%s" % (head[2], "H" if size == 2 else "I"), data[1024:])
spec = json.load(open("tests/vectors/tok_gpt2.json"))
alphabet = {}
rest = 0
for b in range(256):
    if 0x21 <= b <= 0x7e or 0xa1 <= b <= 0xac or 0xae <= b <= 0xff:
        alphabet[chr(b)] = b
    else:
        alphabet[chr(256 + rest)] = b
        rest += 1
token = {i: bytes(alphabet[c] for c in t) for t, i in spec["model"]["vocab"].items()}
docs, now = [], None
for i in ids:
    if i == 1200:
        now = []
        docs.append(now)
    else:
        now.append(token[i])
docs = [b"".join(d) for d in docs]
want = [t for t in (open(n, "rb").read() for n in names) if t]
assert docs == want, (len(docs), len(want), [i for i, (a, b) in enumerate(zip(docs, want)) if a != b][:3])
PY
holds() { python3 "$dir/holds.py" "$dir/out.bin" "$@" 2>>"$dir/err"; }
files=("$dir/a.txt" "$dir/b.txt" "$dir/empty.txt" "$dir/raw.txt" "$dir/big.txt" "$dir/end.txt")

check "files" tokenize "${files[@]}"
check "are documents, each after the end-of-text token" holds uint16 "${files[@]}"
check "the closing line counts them" grep -q "5 documents.*uint16.*bytes per token" "$dir/out"
cp "$dir/out.bin" "$dir/first.bin"
for threads in 1 2 3 7; do
    tokenize "${files[@]}" --threads $threads --quiet
    check "$threads threads give the same bytes" cmp -s "$dir/out.bin" "$dir/first.bin"
done
check "--quiet prints nothing" test ! -s "$dir/out" -a ! -s "$dir/err"
tokenize "$dir/docs.jsonl"
check "lines of .jsonl are documents" holds uint16 "$dir"/doc?.txt
run tokenize "$dir/docs.jsonl" --field text --tokenizer "$gpt2" -o "$dir/again.bin"
check "--field text is the default" cmp -s "$dir/again.bin" "$dir/out.bin"
tokenize "$dir/many.jsonl" --threads 1 && mv "$dir/out.bin" "$dir/first.bin" && tokenize "$dir/many.jsonl" --threads 5
check "lines in several pieces, on 1 and 5 threads" cmp -s "$dir/out.bin" "$dir/first.bin"
check "20000 of them" grep -q ": 20000 documents" "$dir/out"
check "a word of megabytes" tokenize "$dir/long.txt"
check "comes back" holds uint16 "$dir/long.txt"
tokenize "$dir/end.txt" --special
check "--special makes tokens of what looks like one" test "$(od -An -tu2 -j1024 "$dir/out.bin" | tr -s ' ' | xargs)" = "1200 64 1200 65"
tokenize "$dir/a.txt" --end " the"
check "--end names another token" test "$(od -An -tu2 -j1024 -N2 "$dir/out.bin" | xargs)" = "$(python3 -c 'import json; print(json.load(open("tests/vectors/tok_gpt2.json"))["model"]["vocab"]["\u0120the"])')"
tokenize "$dir/a.txt" --end ""
check "--end '' puts none" test "$(od -An -tu2 -j1024 -N2 "$dir/out.bin" | xargs)" != 1200
ids() { od -An -tu2 -j1024 "$dir/out.bin" | tr -s ' ' | xargs; }
llama3=tests/vectors/tok_llama3.json
printf 'A\n' >"$dir/A.txt"
run tokenize "$dir/A.txt" "$dir/A.txt" --tokenizer $llama3 --begin "" -o "$dir/out.bin"
plain=$(ids) # end A newline end A newline
run tokenize "$dir/A.txt" "$dir/A.txt" --tokenizer $llama3 -o "$dir/out.bin"
check "what the tokenizer puts before a text is behind the token that ends one" test "$(ids)" = "$(echo "$plain" | sed 's/\b1105\b/1105 1104/g')"
check "twice" test "$(ids | grep -o 1104 | wc -l)" -eq 2
run tokenize "$dir/A.txt" --tokenizer $llama3 --end "" --begin "A" -o "$dir/out.bin"
check "--begin names another" test "$(ids | cut -d' ' -f1)" = "$(ids | cut -d' ' -f2)"
run tokenize "$dir/A.txt" --tokenizer $llama3 --begin "<|end_of_text|>" -o "$dir/out.bin"
check "a token that does both is there once" test "$(ids | grep -o 1105 | wc -l)" -eq 1
mkdir "$dir/folder"
python3 - "$dir/folder" <<'PY'
import json, sys
t = json.load(open("tests/vectors/tok_gpt2.json"))
t["added_tokens"][0]["id"] = 70000
json.dump(t, open(sys.argv[1] + "/tokenizer.json", "w"))
PY
check "a vocabulary beyond 65536" run tokenize "$dir/a.txt" --tokenizer "$dir/folder" -o "$dir/wide.bin"
check "is written as uint32" test "$(od -An -td4 -N12 "$dir/wide.bin" | xargs | cut -d' ' -f1,2) $(od -An -tu4 -j1024 -N4 "$dir/wide.bin" | xargs)" = "20240801 7 70000"

# What train takes for JSON lines, and in them, is that here.
printf '{"text": "a b", "id": 12345678901234567890}\n\r\n{"text": "c"}\n' >"$dir/n.jsonl"
cp "$dir/n.jsonl" "$dir/n.ndjson"
cp "$dir/n.jsonl" "$dir/n.JSONL"
check "a number of 20 digits in another field" tokenize "$dir/n.jsonl"
cp "$dir/out.bin" "$dir/n.bin"
for name in n.ndjson n.JSONL; do
    tokenize "$dir/$name"
    check "$name is lines" cmp -s "$dir/out.bin" "$dir/n.bin"
done
check "of two documents" grep -q '2 documents' "$dir/out"
cp "$dir/n.jsonl" "$dir/n.json"
cp "$dir/n.jsonl" "$dir/n.txt"
tokenize "$dir/n.json"
check ".json that begins with an object is lines" cmp -s "$dir/out.bin" "$dir/n.bin"
tokenize "$dir/n.txt"
check "lines in .txt are one text" grep -q '1 documents' "$dir/out"
check "which is said" grep -q 'n.txt is read as text.*has "text".*--format) jsonl' "$dir/err"
tokenize "$dir/n.txt" --format jsonl
check "--format jsonl makes lines of them" cmp -s "$dir/out.bin" "$dir/n.bin"
printf '\x1f\x8b\x08 and so on' >"$dir/z.txt"
check "--format text takes any bytes" tokenize "$dir/z.txt" --format text

# What goes wrong is named, and the old output stays.
line() { printf '%s\n' "$@" >"$dir/bad.jsonl"; }
to=(--tokenizer "$gpt2" -o "$dir/out.bin")
refuse 1 "none.txt: No such file" "a missing input" tokenize "$dir/a.txt" "$dir/none.txt" "${to[@]}"
refuse 1 "not a regular file" "a folder as input" tokenize "$dir/folder" "${to[@]}"
refuse 1 'has no token "nowhere" for --begin' "a token to begin with that is none" tokenize "$dir/a.txt" --begin nowhere "${to[@]}"
refuse 1 "none.json: No such file" "a missing tokenizer" tokenize "$dir/a.txt" --tokenizer "$dir/none.json" -o "$dir/out.bin"
refuse 1 "a.txt, line 1" "a tokenizer that is none" tokenize "$dir/a.txt" --tokenizer "$dir/a.txt" -o "$dir/out.bin"
refuse 1 "would be overwritten" "the output as input" tokenize "$dir/out.bin" "${to[@]}"
refuse 1 "no/x.bin" "a missing folder for the output" tokenize "$dir/a.txt" --tokenizer "$gpt2" -o "$dir/no/x.bin"
refuse 1 'no token "<end>" for --end' "an unknown --end" tokenize "$dir/a.txt" "${to[@]}" --end "<end>"
python3 -c 'import json; t = json.load(open("tests/vectors/tok_gpt2.json")); t["added_tokens"] = []; print(json.dumps(t))' >"$dir/noend.json"
refuse 1 "has no end-of-text token" "a tokenizer without one" tokenize "$dir/a.txt" --tokenizer "$dir/noend.json" -o "$dir/out.bin"
line '{"text": "a"}' '' '{"text": 5}'
refuse 1 'bad.jsonl, line 3: field "text" is not a string' "a field that is no text" tokenize "$dir/bad.jsonl" "${to[@]}"
line '{"text": "a"}' '{"body": "b"}'
refuse 1 'bad.jsonl, line 2: no field "text"; it has "body"' "a missing field" tokenize "$dir/bad.jsonl" "${to[@]}"
line '{"text": "a"}' '{"text": "a"' '{"text": "a"}'
refuse 1 "bad.jsonl, line 2: " "a line that is no JSON" tokenize "$dir/bad.jsonl" "${to[@]}"
refuse 2 "unknown option --thread" "an unknown option" tokenize "$dir/a.txt" "${to[@]}" --thread 2
refuse 2 "--threads 0" "no threads" tokenize "$dir/a.txt" "${to[@]}" --threads 0
refuse 2 "--tokenizer PATH is needed" "no tokenizer" tokenize "$dir/a.txt" -o "$dir/out.bin"
refuse 2 "-o OUT.bin is needed" "no output" tokenize "$dir/a.txt" --tokenizer "$gpt2"
refuse 2 "a text file is needed" "no input" tokenize "${to[@]}"
refuse 1 "the inputs hold no text" "nothing but an empty file" tokenize "$dir/empty.txt" "${to[@]}"
refuse 1 "z.txt is compressed with gzip, which is not read: unpack it with gunzip" "a compressed file" tokenize "$dir/z.txt" "${to[@]}"
printf '[{"text": "a"}]\n' >"$dir/array.json"
refuse 1 "jq -c '.[]' $dir/array.json >$dir/array.jsonl" "a JSON array" tokenize "$dir/array.json" "${to[@]}"
refuse 1 "n.bin holds tokens already (llm.c)" "tokens" tokenize "$dir/n.bin" "${to[@]}"
refuse 2 "--format megatron is none of auto, text, jsonl" "another format" tokenize "$dir/a.txt" --format megatron "${to[@]}"
refuse 1 "--field body names the text in JSON lines" "a field of files that have none" tokenize "$dir/a.txt" --field body "${to[@]}"

# Ctrl-C in the middle: nothing is left.
yes "some words about water, and a number: 12345" | head -c 150000000 >"$dir/much.txt"
rm -f "$dir/out.bin"
"$spw" tokenize "$dir/much.txt" "${to[@]}" --threads 1 >"$dir/out" 2>"$dir/err" &
pid=$!
writing() { [ -n "$(find "$dir" -name '*.tmp-*')" ]; }
comes writing
kill -INT $pid
wait $pid
check "Ctrl-C says that nothing was written" test $? -eq 1 -a -n "$(grep stopped "$dir/err")"
check "and leaves nothing" test -z "$(find "$dir" -name 'out.bin*')"
rm -f "$dir/much.txt"

# Another tokenizer than the model's: the checkpoint and what is exported hold the one that was trained with, and eval takes it.
mkdir "$dir/model" "$dir/mine"
cp tests/vectors/tok_qwen2.json "$dir/model/tokenizer.json"
cp tests/vectors/tok_llama3.json "$dir/mine/tokenizer.json"
echo '{"eos_token_id": 3}' | tee "$dir/model/generation_config.json" >"$dir/mine/generation_config.json"
echo '{"chat_template": "x"}' >"$dir/model/tokenizer_config.json"
cat >"$dir/model/config.json" <<JSON
{"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 1300, "max_position_embeddings": 64}
JSON
for t in "$dir/mine" "$dir/mine/tokenizer.json" tests/vectors/tok_llama3.json; do
    cat >"$dir/own.json" <<JSON
{"train_batch_size": 4, "model": {"path": "$dir/model"}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
 "data": {"path": "README.md", "seq_length": 32, "tokenizer": "$t"}, "spillway": {"steps": 2, "device": "cpu", "checkpoint_dir": "$dir/ckpt"}}
JSON
    rm -rf "$dir/ckpt" "$dir/made"
    check "trains with $t" run train "$dir/own.json"
    check "which is in the checkpoint" cmp -s "$dir/ckpt/step-2/tokenizer.json" "$dir/mine/tokenizer.json"
    check "and nothing of the model's" test ! -e "$dir/ckpt/step-2/tokenizer_config.json" -a -e "$dir/ckpt/step-2/generation_config.json"
    check "export" run export "$dir/ckpt" --to "$dir/made"
    check "has it" cmp -s "$dir/made/tokenizer.json" "$dir/mine/tokenizer.json"
    run eval "$dir/ckpt" --data README.md --batches 4 --tokenizer "$dir/mine"
    sed 's/ sequences.*//' "$dir/out" >"$dir/want"
    [ "${t#/}" = "$t" ] || cp "$dir/model/tokenizer.json" "$dir/ckpt/step-2/" # as checkpoints had it
    run eval "$dir/ckpt" --data README.md --batches 4
    check "eval takes it" cmp -s <(sed 's/ sequences.*//' "$dir/out") "$dir/want"
done
mkdir "$dir/named"
cp tests/vectors/tok_llama3.json "$dir/named/mine.json"
echo "{{ '<|start_header_id|>' + role }}" >"$dir/named/chat_template.jinja"
echo '{"add_bos_token": true}' >"$dir/named/tokenizer_config.json"
rm -rf "$dir/ckpt"
check "trains with a tokenizer of another name" run train "$dir/own.json" --set data.tokenizer="$dir/named/mine.json"
check "what is read beside it is in the checkpoint" cmp -s "$dir/ckpt/step-2/chat_template.jinja" "$dir/named/chat_template.jinja"
check "all of it" cmp -s "$dir/ckpt/step-2/tokenizer_config.json" "$dir/named/tokenizer_config.json"
cp -r "$dir/mine" "$dir/moving"
rm -rf "$dir/ckpt"
check "trains with a tokenizer" run train "$dir/own.json" --set data.tokenizer="$dir/moving"
cp tests/vectors/tok_qwen2.json "$dir/moving/tokenizer.json"
run eval "$dir/ckpt" --data README.md --batches 4
sed 's/ sequences.*//' "$dir/out" >"$dir/got"
run eval "$dir/ckpt" --data README.md --batches 4 --tokenizer "$dir/mine"
check "that is another one since: eval takes the checkpoint's" cmp -s <(sed 's/ sequences.*//' "$dir/out") "$dir/got"

# Bytes, though the model has a tokenizer: eval and generate read and write bytes, and nobody is given the model's.
rm -rf "$dir/ckpt" "$dir/made"
check "trains with bytes" run train "$dir/own.json" --set data.tokenizer=bytes
check "the checkpoint holds no tokenizer" test ! -e "$dir/ckpt/step-2/tokenizer.json" -a -e "$dir/ckpt/step-2/generation_config.json"
check "export" run export "$dir/ckpt" --to "$dir/made"
check "has none either" test ! -e "$dir/made/tokenizer.json" -a -e "$dir/made/generation_config.json"
cp "$dir/model/tokenizer.json" "$dir/ckpt/step-2/" # as checkpoints had it
bytes=$(stat -c %s README.md)
check "eval takes bytes" run eval "$dir/ckpt" --data README.md
check "all of them" grep -q " $(((bytes - 1) / 32 * 32)) tokens" "$dir/out"
check "generate" run generate "$dir/ckpt" --prompt "the dam" --tokens 1 --json
check "does so, too" grep -q '"prompt_tokens":7[,}]' "$dir/out"
rm -rf "$dir/ckpt"
check "trains with a tokenizer" run train "$dir/own.json"

# Prompts begin as texts did in training.
prompt_tokens() { run generate "$dir/ckpt" --prompt "the dam" --tokens 1 --json && grep -o '"prompt_tokens":[0-9]*' "$dir/out" | cut -d: -f2; }
with=$(prompt_tokens)
rm -rf "$dir/ckpt"
check "trains without what begins a text" run train "$dir/own.json" --set data.begin_of_text=false
check "a prompt has one token less then" test "$(prompt_tokens)" = $((with - 1))

# An input that is cut off while it is read, as a log is that is rotated: what is not there any more cannot be a signal that nobody expects.
for i in $(seq 48); do cat "$dir/big.txt"; done >"$dir/rotated.txt"
echo old >"$dir/out.bin"
run tokenize "$dir/rotated.txt" "${to[@]}" --threads 1 &
comes compgen -G "$dir/out.bin.tmp-*" >/dev/null
: >"$dir/rotated.txt"
wait $!
check "an input that is cut off meanwhile is an error" test $? -eq 1
check "by name" said "input $dir/rotated.txt was cut off while it was read, or its disk failed; nothing was written to $dir/out.bin"
check "and leaves the old output alone" test "$(cat "$dir/out.bin")" = old -a -z "$(compgen -G "$dir/out.bin.tmp-*")"
rm "$dir/rotated.txt"

# A name of the hub in place of a folder, and a file that is not there.
refuse 1 '"hf download owner/name" fetches it there' "a model's name on the hub" tokenize "$dir/big.txt" --tokenizer owner/name -o "$dir/out.bin"
refuse 1 "tokenizer owner/tokenizer.json: No such file or directory" "a file that is missing" tokenize "$dir/big.txt" --tokenizer owner/tokenizer.json -o "$dir/out.bin"

# A file system that is full, as far as a shell can make one.
full() { (ulimit -f 100; exec timeout -s KILL 120 "$spw" "$@"); }
run() { full "$@" >"$dir/out" 2>"$dir/err"; }
refuse 1 "File too large" "a file that may not grow" tokenize "$dir/big.txt" "${to[@]}"
check "names the file and how far it came" grep -q "writing .*out.bin.*after [0-9]* tokens" "$dir/err"
echo "1..$n"
