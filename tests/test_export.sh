#!/bin/bash
# Weights in and out: training from a folder, export in other types and shards, llm.c's files, refusals, memory. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
spw=${SPW_BUILD:-build/release}/spillway
export OPENBLAS_NUM_THREADS=1
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-export-XXXXXX")
trap 'umount "$dir/small" 2>/dev/null; rm -rf "$dir"' EXIT
. tests/lib_tap.sh
run() { timeout -s KILL 300 "$spw" "$@" >"$dir/out" 2>"$dir/err"; }
said() { grep -qF -- "$1" "$dir/err" "$dir/out"; }
mkdir "$dir/swap"
cp docs/DESIGN.md "$dir/text"
cat >"$dir/c.json" <<JSON
{ "model": {"model_type": "gpt2", "vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 3, "n_head": 4},
  "data": {"path": ["$dir/text"], "seq_length": 32, "seed": 1},
  "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
  "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$dir/swap"},
                        "offload_optimizer": {"device": "nvme", "nvme_path": "$dir/swap"}},
  "spillway": {"steps": 4, "device": "cpu", "chunk_elems": 16384, "checkpoint_dir": "$dir/a", "run_log": "$dir/log"} }
JSON
c=$dir/c.json
folder() { printf 'model={"path":"%s"}' "$1"; }
still="--set spillway.steps=1 --set optimizer.params.lr=0"

# A checkpoint is a folder to start from; a step that changes nothing shows that the weights are the same.
check "trains" run train "$c" --quiet
check "starts from the checkpoint's folder" run train "$c" --set "$(folder "$dir/a/step-4")" $still --set spillway.checkpoint_dir="$dir/b"
check "says so" grep -qF "start    the weights in $dir/a/step-4" "$dir/out"
check "with the same bytes" cmp -s "$dir/a/step-4/model.safetensors" "$dir/b/step-1/model.safetensors"
check "on host, in other chunks" run train "$c" --set "$(folder "$dir/a/step-4")" $still --set spillway.checkpoint_dir="$dir/b2" \
    --set spillway.chunk_elems=4096 --set zero_optimization.offload_param='{"device":"cpu"}' --set zero_optimization.offload_optimizer='{"device":"cpu"}'
check "the same" cmp -s "$dir/a/step-4/model.safetensors" "$dir/b2/step-1/model.safetensors"
check "random on request" run train "$c" --set "$(folder "$dir/a/step-4")" $still --set spillway.start=random --set spillway.checkpoint_dir="$dir/r"
check "is something else" test "$(cmp "$dir/a/step-4/model.safetensors" "$dir/r/step-1/model.safetensors" 2>&1 | wc -l)" -eq 1
expect 2 "model.path" "weights without a folder" train "$c" --set spillway.start=weights --set spillway.checkpoint_dir=
mkdir "$dir/bare"
cp "$dir/a/step-4/config.json" "$dir/bare"
check "a folder without weights starts at random" run train "$c" --set "$(folder "$dir/bare")" $still --set spillway.checkpoint_dir=
check "and does not claim otherwise" test "$(grep -c '^start' "$dir/out")" -eq 0
expect 1 "$dir/bare" "unless they were asked for" train "$c" --set "$(folder "$dir/bare")" --set spillway.start=weights --set spillway.checkpoint_dir=
cp "$dir/a/step-4/model.safetensors" "$dir/bare"
truncate -s -100 "$dir/bare/model.safetensors"
expect 1 "model.safetensors" "a truncated file" train "$c" --set "$(folder "$dir/bare")" --set spillway.checkpoint_dir=

# Export: as stored, in shards, in other types; the masters of a checkpoint.
check "export" run export "$dir/a" --to "$dir/x1"
check "as stored: the same file" cmp -s "$dir/a/step-4/model.safetensors" "$dir/x1/model.safetensors"
check "a name that ends with a slash" run export "$dir/a" --to "$dir/slash/"
check "the same folder" diff -r "$dir/x1" "$dir/slash"
check "import is the same" run import "$dir/a/step-4" --to "$dir/x2" --dtype fp32 --shard-size 200KB
check "shards and an index" test "$(ls "$dir/x2" | grep -c '^model-0000[1-4]-of-00004.safetensors$')" -eq 4 -a -s "$dir/x2/model.safetensors.index.json"
check "one file again" run export "$dir/x2" --to "$dir/x3"
check "inspect agrees" run inspect "$dir/x3" --digest
cp "$dir/out" "$dir/one"
run inspect "$dir/x2" --digest
digests() { awk '/\[/ { print $1, $2, $NF }' "$1" | sort; }
check "the same tensors" test "$(digests "$dir/one")" = "$(digests "$dir/out")"
check "which are the masters" python3 - "$dir" <<'PY'
import json, struct, sys
def tensors(path):
    with open(path, "rb") as f:
        size, = struct.unpack("<Q", f.read(8))
        head = json.loads(f.read(size))
        body = f.read()
    return {k: body[slice(*v["data_offsets"])] for k, v in head.items() if k != "__metadata__"}
masters = tensors(sys.argv[1] + "/a/step-4/optimizer-00001-of-00001.safetensors")
out = tensors(sys.argv[1] + "/x3/model.safetensors")
sys.exit(0 if out and all(masters[k + ".master"] == v for k, v in out.items()) else 1)
PY
echo '{"a": 1}' >"$dir/x3/tokenizer.json"
echo '{{ messages }}' >"$dir/x3/chat_template.jinja"
echo x >"$dir/x3/tokenizer.model"
echo "YQ== 0" >"$dir/x3/tiktoken.model"
check "to bf16, with companions" run export "$dir/x3" --to "$dir/x4" --dtype bf16
check "the tokenizer came along" cmp -s "$dir/x3/tokenizer.json" "$dir/x4/tokenizer.json"
check "so did the chat template" cmp -s "$dir/x3/chat_template.jinja" "$dir/x4/chat_template.jinja"
check "and SentencePiece's model" cmp -s "$dir/x3/tokenizer.model" "$dir/x4/tokenizer.model"
check "and Kimi's vocabulary" cmp -s "$dir/x3/tiktoken.model" "$dir/x4/tiktoken.model"
check "config.json names the type" grep -q '"torch_dtype": "bfloat16"' "$dir/x4/config.json"
check "to fp16" run export "$dir/x3" --to "$dir/x5" --dtype fp16
# What fp16 cannot hold would be infinity, and all that is computed with it no number.
mkdir "$dir/large"
cp "$dir/x3/config.json" "$dir/large"
beyond() { python3 - "$dir" "$1" <<'PY'
import json, struct, sys
d, value = sys.argv[1], float(sys.argv[2])
b = bytearray(open(d + "/x3/model.safetensors", "rb").read())
n = struct.unpack("<Q", b[:8])[0]
at = 8 + n + json.loads(b[8:8 + n])["ln_f.weight"]["data_offsets"][0]
b[at + 12:at + 16] = struct.pack("<f", value)
open(d + "/large/model.safetensors", "wb").write(b)
PY
}
check "a weight that rounds to the largest is made" beyond -65519
check "and goes to fp16" run export "$dir/large" --to "$dir/large16" --dtype fp16
check "one beyond is made" beyond -65520
expect 1 "ln_f.weight, element 3, is -65520, and fp16 ends at 65504" "and does not" export "$dir/large" --to "$dir/large16b" --dtype fp16
check "nothing is left of it" test ! -e "$dir/large16b" -a ! -e "$dir/large16b.partial"
check "bf16 has it" run export "$dir/large" --to "$dir/large16b" --dtype bf16
rm "$dir/x5/tokenizer.json" "$dir/x5/tokenizer.model" "$dir/x5/tiktoken.model"
check "trains from it" run train "$c" --set "$(folder "$dir/x5")" $still --set spillway.checkpoint_dir=

# GPT-2's masks, as old files have them beside the weights: of a type that nothing here computes with, and first in the file.
mkdir "$dir/old" "$dir/odd"
cp "$dir/a/step-4/config.json" "$dir/old"
cp "$dir/a/step-4/config.json" "$dir/odd"
python3 - "$dir" <<'PY'
import json, struct, sys
d = sys.argv[1]
def parts(path):
    with open(path, "rb") as f:
        size, = struct.unpack("<Q", f.read(8))
        head = json.loads(f.read(size))
        return head, f.read()
def put(path, head, body):
    text = json.dumps(head).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + body)
head, body = parts(d + "/a/step-4/model.safetensors")
more = {"h.0.attn.masked_bias": ("F32", [], 4), "h.0.attn.bias": ("BOOL", [1, 1, 32, 32], 1024), "h.1.attn.bias": ("U8", [1, 1, 32, 32], 1024)}
at = 0
for name, (dtype, shape, size) in more.items():
    more[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
    at += size
for name in head:
    if name != "__metadata__":
        head[name]["data_offsets"] = [at + k for k in head[name]["data_offsets"]]
put(d + "/old/model.safetensors", {**more, **head}, bytes(at) + body)
head["h.1.ln_1.bias" if "h.1.ln_1.bias" in head else "transformer.h.1.ln_1.bias"]["dtype"] = "I16"
put(d + "/odd/model.safetensors", {**more, **head}, bytes(at) + body)
PY
check "inspect of old masks" run inspect "$dir/old"
check "names their types" grep -qE '^  h.0.attn.bias +BOOL +\[1, 1, 32, 32\] +1.00 KiB$' "$dir/out"
check "and the model" grep -q "^the tensors are this model's" "$dir/out"
check "export without them" run export "$dir/old" --to "$dir/x6"
check "as the weights are stored" cmp -s "$dir/a/step-4/model.safetensors" "$dir/x6/model.safetensors"
check "generate beside them" run generate "$dir/old" --prompt "The store" --tokens 5 --temperature 0
cp "$dir/out" "$dir/beside"
run generate "$dir/x6" --prompt "The store" --tokens 5 --temperature 0
check "the same text" cmp -s "$dir/out" "$dir/beside"
expect 1 "ln_1.bias is I16; F32, BF16 and F16 are read" "a parameter of such a type" export "$dir/odd" --to "$dir/no"

# Text through a tokenizer: named, or beside the weights; the same tokens as a file that spillway tokenize made.
mkdir "$dir/t"
sed 's/"vocab_size": [0-9]*/"vocab_size": 4096/' "$dir/bare/config.json" >"$dir/t/config.json"
cp tests/vectors/tok_gpt2.json "$dir/t/tokenizer.json"
loss() { sed -n 's/.*"loss":\([0-9.e-]*\),.*/\1/p' "$dir/log"; }
check "trains through the folder's tokenizer" run train "$c" --set "$(folder "$dir/t")" --set spillway.checkpoint_dir=
beside=$(loss)
check "saves" run train "$c" --set "$(folder "$dir/t")" --set spillway.checkpoint_dir="$dir/tt"
check "the tokenizer comes along" cmp -s "$dir/t/tokenizer.json" "$dir/tt/step-4/tokenizer.json"
check "and serves generate" run generate "$dir/tt" --prompt "The store" --tokens 5 --temperature 0
check "through a named one" run train "$c" --set "$(folder "$dir/t")" --set data.tokenizer="$dir/t/tokenizer.json" --set spillway.checkpoint_dir=
check "the same losses" test -n "$beside" -a "$beside" = "$(loss)"
check "as bytes" run train "$c" --set "$(folder "$dir/t")" --set data.tokenizer=bytes --set spillway.checkpoint_dir=
check "other losses" test "$beside" != "$(loss)"
check "tokenize" run tokenize "$dir/text" --tokenizer "$dir/t" -o "$dir/text.bin"
check "trains on its tokens" run train "$c" --set "$(folder "$dir/t")" --set data.path="$dir/text.bin" --set spillway.checkpoint_dir=
check "as tokens" grep -q 'llm.c u16' "$dir/out"
expect 2 "the model's vocab_size is 256" "more tokens than the model has" train "$c" --set data.tokenizer="$dir/t" --set spillway.checkpoint_dir=

# llm.c's file of the same weights, written by other code.
python3 - "$dir" <<'PY'
import array, json, struct, sys
d = sys.argv[1]
with open(d + "/x3/model.safetensors", "rb") as f:
    size, = struct.unpack("<Q", f.read(8))
    head = json.loads(f.read(size))
    body = f.read()
def get(name):
    t = head[name]
    a = array.array("f")
    a.frombytes(body[slice(*t["data_offsets"])])
    return a, t["shape"]
def turned(name):
    a, (rows, cols) = get(name)
    return array.array("f", (a[r * cols + c] for c in range(cols) for r in range(rows)))
L, C, V, T = 3, 64, 256, 32
find = lambda tail: next(k for k in head if k.endswith(tail))
def layers(tail, turn=False):
    out = array.array("f")
    for l in range(L):
        name = find("h.%d.%s" % (l, tail))
        out += turned(name) if turn else get(name)[0]
    return out
body_out = [get(find("wte.weight"))[0] + array.array("f", [0] * (128 * C)), get(find("wpe.weight"))[0], layers("ln_1.weight"),
            layers("ln_1.bias"), layers("attn.c_attn.weight", True), layers("attn.c_attn.bias"), layers("attn.c_proj.weight", True),
            layers("attn.c_proj.bias"), layers("ln_2.weight"), layers("ln_2.bias"), layers("mlp.c_fc.weight", True),
            layers("mlp.c_fc.bias"), layers("mlp.c_proj.weight", True), layers("mlp.c_proj.bias"), get(find("ln_f.weight"))[0],
            get(find("ln_f.bias"))[0]]
with open(d + "/gpt2.bin", "wb") as f:
    f.write(struct.pack("<256i", 20240326, 3, T, V, L, 4, C, V + 128, *[0] * 248))
    for a in body_out:
        a.tofile(f)
PY
check "import of llm.c's weights" run import "$dir/gpt2.bin" --to "$dir/y1"
check "the same tensors, byte for byte" cmp -s "$dir/x3/model.safetensors" "$dir/y1/model.safetensors"
check "trains from them" run train "$c" --set "$(folder "$dir/y1")" $still --set spillway.checkpoint_dir=
broken() { # NAME TEXT python statement on b, a bytearray of the file
    python3 -c 'import struct, sys; b = bytearray(open(sys.argv[1], "rb").read()); exec(sys.argv[3]); open(sys.argv[2], "wb").write(b)' "$dir/gpt2.bin" "$dir/broken.bin" "$3"
    expect 1 "$2" "$1" import "$dir/broken.bin" --to "$dir/no"
}
broken "another magic number" "magic number 7 at offset 0" 'b[0:4] = struct.pack("<i", 7)'
broken "another version" "version 9 at offset 4" 'b[4:8] = struct.pack("<i", 9)'
broken "no layers" "layers 0 at offset 16" 'b[16:20] = bytes(4)'
broken "a negative size" "channels -64 at offset 24" 'b[24:28] = struct.pack("<i", -64)'
broken "heads that do not divide" "for 5 heads" 'b[20:24] = struct.pack("<i", 5)'
broken "cut short" "its header says" 'del b[-1:]'
broken "too long" "its header says" 'b += b"x"'
broken "a header alone" "ends at byte 500" 'del b[500:]'
check "nothing is left of them" test ! -e "$dir/no" -a ! -e "$dir/no.partial"

# A checkpoint whose bytes changed since it was saved is exported by nobody.
cp -r "$dir/a/step-4" "$dir/hurt"
hurt() { printf '\125' | dd of="$dir/hurt/$1" bs=1 seek=$(($(stat -c %s "$dir/hurt/$1") - 9)) conv=notrunc 2>/dev/null; }
hurt optimizer-00001-of-00001.safetensors
expect 1 "optimizer-00001-of-00001.safetensors: digest is" "a damaged master" export "$dir/hurt" --to "$dir/no" --dtype fp32
check "is none of the weights" run export "$dir/hurt" --to "$dir/x7"
hurt model.safetensors
expect 1 "model.safetensors: digest is" "a damaged weight" export "$dir/hurt" --to "$dir/no"
expect 1 "model.safetensors: digest is" "nor trained from" train "$c" --set "$(folder "$dir/hurt")" --set spillway.checkpoint_dir=

# auto_map names Python files, which do not come along: what is written is a model of transformers' own.
check "a folder with auto_map" run export tests/vectors/families/phi3 --to "$dir/phi3"
check "auto_map stays behind" test "$(grep -c auto_map tests/vectors/families/phi3/config.json "$dir/phi3/config.json" | cut -d: -f2 | xargs)" = "1 0"
cp -r tests/vectors/families/deepseek_v3 "$dir/kimi"
sed -i 's/"model_type": "deepseek_v3"/"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}/' "$dir/kimi/config.json"
check "Kimi's, whose class is one's in that file" run export "$dir/kimi" --to "$dir/kimi-out"
cp tests/vectors/tok_kimi/* "$dir/kimi"
expect 2 "data.tokenizer $dir/kimi has tokens up to 904, the model's vocab_size is 41" "its tiktoken.model is what text goes through" \
    train examples/lora.json --set model.path="$dir/kimi" --set data.path=README.md --set data.chat= --set data.seq_length=16 --set spillway.checkpoint_dir=
check "is DeepSeek-V3" test "$(grep -cE '"model_type": "deepseek_v3"|auto_map|kimi' "$dir/kimi-out/config.json")" = 1

# Refusals.
expect 1 "exists" "a folder that exists" export "$dir/a" --to "$dir/x1"
expect 2 "--to" "no target" export "$dir/a"
expect 2 "--dtype int8" "another type" export "$dir/a" --to "$dir/no" --dtype int8
expect 2 "--shard-size" "a size that is none" export "$dir/a" --to "$dir/no" --shard-size many
mkdir "$dir/other.partial"
expect 1 "nowhere" "no source" export "$dir/nowhere" --to "$dir/other"
check "takes nothing away" test -d "$dir/other.partial"
touch "$dir/other.partial/mine.txt" "$dir/other.partial/config.json"
ln -s nowhere "$dir/dangling"
expect 1 "dangling, where export makes a new folder" "a link to nothing, before anything is written" export "$dir/a" --to "$dir/dangling"
expect 1 "other.partial, where files are to be written first, has mine.txt" "somebody's folder in the way" export "$dir/a" --to "$dir/other"
check "stays whole" test -e "$dir/other.partial/mine.txt" -a -e "$dir/other.partial/config.json"
rm "$dir/other.partial/mine.txt"
touch "$dir/other.partial/model-00001-of-00002.safetensors.tmp-17" "$dir/other.partial/tokenizer.json"
expect 0 "" "what a killed export left is replaced" export "$dir/a" --to "$dir/other"
check "without a rest" test ! -e "$dir/other.partial" -a -e "$dir/other/config.json"
expect 0 "--shard-size" "help" help export
mkdir "$dir/small"
if mount -t tmpfs -o size=100k tmpfs "$dir/small" 2>/dev/null; then
    expect 1 "writing $dir/small/x: it needs " "a disk that holds some of the shards is said before the first" \
        export "$dir/a" --to "$dir/small/x" --dtype fp32 --shard-size 20000
    check "with what is free" grep -qE "it needs [0-9.]+ KiB \([0-9]+ bytes\), 100 KiB free; make room, or take another folder" "$dir/err"
    check "and leaves nothing" test -z "$(ls -A "$dir/small")"
    umount "$dir/small"
else
    skip "a disk that holds some of the shards" "mounting is not permitted here"
fi
full() { (ulimit -f 100; exec timeout -s KILL 60 "$spw" export "$dir/a" --to "$dir/no" >"$dir/out" 2>"$dir/err"); }
check "a file that may not grow is an error" test "$(full; echo $?)" -ne 0
check "and nothing is left of it" test ! -e "$dir/no" -a ! -e "$dir/no.partial"

# Of a model of text and images the text part goes out, and its configuration with it: with the outer one transformers finds none of the
# tensors' names and draws the weights anew.
for kind in gemma3:gemma3_text:Gemma3ForCausalLM mistral3:mistral:MistralForCausalLM; do
    IFS=: read -r outer inner class <<<"$kind"
    check "$outer's folder" run export "tests/vectors/families/${outer}_images" --to "$dir/$outer"
    check "its configuration is the text part's" python3 - "$dir/$outer/config.json" "$inner" "$class" "tests/vectors/families/${outer}_images/config.json" <<'PY'
import json, sys
c, source = json.load(open(sys.argv[1])), json.load(open(sys.argv[4]))
eos = source.get("eos_token_id", source["text_config"]["eos_token_id"])
sys.exit(not (c["model_type"] == sys.argv[2] and c["architectures"] == [sys.argv[3]] and c["torch_dtype"] == "bfloat16"
              and c["eos_token_id"] == eos is not None and "vision_config" not in c and "text_config" not in c))
PY
    run inspect "tests/vectors/families/${outer}_images"
    tail -2 "$dir/out" >"$dir/before"
    check "$outer's export is read" run inspect "$dir/$outer"
    tail -2 "$dir/out" >"$dir/after"
    check "as the same model" cmp -s "$dir/before" "$dir/after"
done
# The names that releases between wrote are as long, so that no byte moves.
cp -r tests/vectors/families/gemma3_images "$dir/newer"
LC_ALL=C sed -i 's/language_model[.]model[.]/model.language_model./g' "$dir/newer/model.safetensors"
check "a folder of the text behind model.language_model" run export "$dir/newer" --to "$dir/newer-out"
check "has the same weights" cmp -s "$dir/newer-out/model.safetensors" "$dir/gemma3/model.safetensors"

expect 1 '"hf download owner/name" fetches it there' "a name of the hub is no folder" export owner/name --to "$dir/hub"
expect 1 '"hf download owner/name" fetches it there' "nor to generate from" generate owner/name --prompt a

# Memory does not grow with the model: 350 M parameters, 700 MB, from a file without blocks.
python3 - "$dir" <<'PY'
import json, os, struct, sys
d = sys.argv[1] + "/big"
os.mkdir(d)
V, T, C, L = 256, 32, 1024, 27
shapes = {"transformer.wte.weight": [V, C], "transformer.wpe.weight": [T, C], "transformer.ln_f.weight": [C], "transformer.ln_f.bias": [C]}
for l in range(L):
    for name, shape in (("ln_1.weight", [C]), ("ln_1.bias", [C]), ("attn.c_attn.weight", [C, 3 * C]), ("attn.c_attn.bias", [3 * C]),
                        ("attn.c_proj.weight", [C, C]), ("attn.c_proj.bias", [C]), ("ln_2.weight", [C]), ("ln_2.bias", [C]),
                        ("mlp.c_fc.weight", [C, 4 * C]), ("mlp.c_fc.bias", [4 * C]), ("mlp.c_proj.weight", [4 * C, C]), ("mlp.c_proj.bias", [C])):
        shapes["transformer.h.%d.%s" % (l, name)] = shape
head, at = {}, 0
for name, shape in shapes.items():
    size = 2
    for s in shape:
        size *= s
    head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
    at += size
text = json.dumps(head).encode()
text += b" " * (-len(text) % 8)
with open(d + "/model.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    f.truncate(8 + len(text) + at)
json.dump({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": V, "n_positions": T, "n_embd": C, "n_layer": L, "n_head": 16},
          open(d + "/config.json", "w"))
PY
rss() { python3 -c 'import resource, subprocess, sys; r = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode; print(r, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)' "$@"; }
set -- $(rss "$spw" export "$dir/big" --to "$dir/big2" --shard-size 200MB)
echo "# exit $1, peak $2 MiB"
limit=24
case ${SPW_BUILD:-} in *asan* | *tsan*) limit=400 ;; esac
check "a model of 700 MB passes through a few MiB" test "$1" -eq 0 -a "$2" -lt "$limit"
echo "1..$n"
