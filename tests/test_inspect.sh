#!/bin/bash
# spillway inspect: names, shapes, sizes and digests as the files have them, for a file, shards and a checkpoint. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
vectors=tests/vectors/families
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-inspect-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
says() { grep -qE -- "$1" "$dir/out"; }
expects="run inspect"

# The same from the headers alone, and digests by the system's xxhash where there is one.
cat >"$dir/headers.py" <<'PY'
import ctypes, ctypes.util, glob, json, struct, sys
got = json.load(open(sys.argv[1]))
lib = ctypes.util.find_library("xxhash")
hash64 = None
if lib:
    hash64 = ctypes.CDLL(lib).XXH3_64bits
    hash64.restype, hash64.argtypes = ctypes.c_uint64, [ctypes.c_char_p, ctypes.c_size_t]
want = {}
for path in sys.argv[2:]:
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    for name, t in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            a, b = t["data_offsets"]
            dtype = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}[t["dtype"]]
            want[path, name] = (dtype, t["shape"], b - a, data[8 + size + a:8 + size + b])
assert len(got["tensors"]) == len(want), len(want)
for t in got["tensors"]:
    dtype, shape, size, raw = want[t["file"], t["name"]]
    assert (t["dtype"], t["shape"], t["bytes"]) == (dtype, shape, size), t
    if "xxh3" in t and hash64:
        assert t["xxh3"] == "%016x" % hash64(raw, len(raw)), t
assert got["bytes"] == sum(w[2] for w in want.values())
assert got["elements"] == sum(w[2] // (4 if w[0] == "fp32" else 2) for w in want.values())
PY
headers() { python3 "$dir/headers.py" "$dir/out" "$@" 2>>"$dir/err"; }

run inspect $vectors/llama/model.safetensors
check "a file: its tensors" says '^  model.layers.1.mlp.down_proj.weight +fp32 +\[18, 29\] +2.04 KiB$'
check "a file: the sum" says '^20 tensors, 5688 elements, 22.2 KiB$'
run inspect $vectors/qwen2
check "a folder: its shards" test "$(grep -c '^tests.*model-0000.-of-00004.safetensors$' "$dir/out")" -eq 4
check "a folder: its model" says '^qwen2, .*: 2 layers, width 24, 4 heads of 6 \(2 key/value\), MLP 29, vocabulary 41, tied head$'
check "a folder: the tensors are that model's" says "^the tensors are this model's$"
for case in gpt2_untied qwen2 mistral; do
    run inspect $vectors/$case --json --digest
    check "$case: names, shapes, sizes and digests are the files'" headers $vectors/$case/model*.safetensors
done

# A folder whose name is not UTF-8: all is shown, and the name with U+FFFD.
odd=$dir/$'b\xffd'
cp -r $vectors/llama "$odd"
sed -i 's/"intermediate_size": 29/"intermediate_size": 30/' "$odd/config.json"
run inspect "$odd" --json
check "a name that is not UTF-8 is in JSON" python3 - "$dir/out" "$dir" <<'PY2'
import json, sys
got = json.loads(open(sys.argv[1], "rb").read())
assert len(got["tensors"]) == 20 and got["path"] == sys.argv[2] + "/b\ufffdd", got["path"]
assert got["tensors"][0]["file"] == got["path"] + "/model.safetensors" and "refusal" in got
PY2

# Another model's configuration beside the weights, and one that is not built: both are said, the tensors are still listed.
cp -r $vectors/llama "$dir/other"
sed -i 's/"intermediate_size": 29/"intermediate_size": 30/' "$dir/other/config.json"
run inspect "$dir/other"
check "tensors of another model are named" says 'not a model that spillway trains: .*down_proj.weight has shape \[18, 29\], this model needs \[18, 30\]'
sed -i 's/"llama"/"mamba"/' "$dir/other/config.json"
run inspect "$dir/other"
check "an unknown family is named" says 'not a model that spillway trains: .*config.json: not supported yet: model_type "mamba"'
check "and its tensors are listed" says '^20 tensors'

run inspect tests/vectors/scaled/llama
check "8-bit floats are this model's" says "^the tensors are this model's\$"
check "under one heading" says '^  name {38,}dtype    shape '
check "codes" says '^  model.layers.1.mlp.up_proj.weight +F8_E4M3  \[44, 24\] +1.03 KiB$'
check "and scales" says '^  model.layers.1.mlp.up_proj.weight_scale_inv +fp32     \[3, 3\] +36 B$'

cat >"$dir/run.json" <<EOF
{"model": {"model_type": "llama", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 29, "vocab_size": 256},
 "data": {"path": ["README.md"], "seq_length": 16}, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
 "spillway": {"steps": 2, "checkpoint_interval": 1, "device": "cpu", "checkpoint_dir": "$dir/ck"}}
EOF
check "a model trains" run train "$dir/run.json" --quiet
run inspect "$dir/ck"
check "of several checkpoints the newest" says '^checkpoint of step 2, 32 tokens$'
check "its weights" says '^  lm_head.weight +bf16 +\[256, 24\] +12.0 KiB$'
check "its optimizer" says '^  lm_head.weight.exp_avg_sq +fp32 +\[256, 24\] +24.0 KiB$'
run inspect "$dir/ck/step-1" --json --digest
check "one checkpoint: all its files" headers "$dir"/ck/step-1/*.safetensors
check "one checkpoint: its step" says '^  "step": 1,$'
mv "$dir/ck" "$dir/ck [old]*"
run inspect "$dir/ck [old]*"
check "a name with the shell's characters: its optimizer too" says '^  lm_head.weight.exp_avg_sq +fp32 +\[256, 24\] +24.0 KiB$'
check "a model with adapters trains" run train "$dir/run.json" --quiet --set spillway.checkpoint_dir="$dir/lora" \
    --set 'spillway.lora={"rank":2,"targets":["q_proj"]}'
run inspect "$dir/lora" --json --digest
check "its adapters too" headers "$dir"/lora/step-2/*.safetensors
for file in model optimizer-00001-of-00001; do
    cp -r "$dir/lora/step-2" "$dir/hurt"
    rm "$dir/hurt/$file.safetensors" # it may be a link
    cp "$dir/lora/step-2/$file.safetensors" "$dir/hurt"
    printf X | dd of="$dir/hurt/$file.safetensors" bs=1 seek=$(($(wc -c <"$dir/hurt/$file.safetensors") - 3)) conv=notrunc 2>/dev/null
    expect 1 "$file.safetensors: digest is" "a byte of $file.safetensors that is another one" "$dir/hurt" --digest
    check "is not looked at without --digest" run inspect "$dir/hurt"
    rm -r "$dir/hurt"
done
cp -r "$dir/lora/step-2" "$dir/bare"
rm "$dir/bare/optimizer-00001-of-00001.safetensors"
run inspect "$dir/bare" --digest
check "one without its optimizer is not whole" test $? -eq 1
check "and that is said" says '^training cannot go on from it: .*/bare/optimizer-00001-of-00001.safetensors is not there$'
# What says what a checkpoint is: tensors are shown all the same, and the exit code is that of damage.
cp -r "$dir/lora/step-2" "$dir/torn"
head -c 60 "$dir/lora/step-2/spillway.json" >"$dir/torn/spillway.json"
run inspect "$dir/torn"
check "half a manifest is a failure" test $? -eq 1
check "is said" says '^training cannot go on from it: .*spillway.json'
check "with the tensors" says '^[0-9]+ tensors, '
run inspect "$dir/torn" --json
check "in JSON too" test $? -eq 1 -a -n "$(grep no_resume "$dir/out")"

head -c 300 $vectors/llama/model.safetensors >"$dir/short.safetensors"
expect 1 "short.safetensors" "a truncated file is refused" "$dir/short.safetensors"
cp -r $vectors/qwen2 "$dir/lost"
rm "$dir/lost/model-00002-of-00004.safetensors"
expect 1 "in shard model-00002-of-00004.safetensors: open" "a missing shard is named" "$dir/lost"
expect 1 "No such file" "a path that is not there" "$dir/nothing"
mkdir "$dir/empty"
expect 1 "has none of model.safetensors, model.safetensors.index.json, pytorch_model.bin" "a folder without weights" "$dir/empty"
expect 2 "unknown option --sum" "an unknown option" "$dir" --sum
expect 2 "a file or folder is needed" "no path"
expect 2 "one path at a time" "two paths" a b
run help inspect
check "help" says '^spillway inspect PATH'
echo "1..$n"
