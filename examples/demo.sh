#!/bin/sh
# make demo: trains a GPT of about 10 million parameters whose weights and optimizer records stream from disk, then
# draws text from the checkpoint. usage: demo.sh [TEXT-FILE-OR-GLOB]
set -eu
cd "$(dirname "$0")/.."
rm -rf demo-out
mkdir -p demo-out/swap
data=${1:-}
if [ -n "$data" ]; then
    paths="[\"$data\"]"
else
    paths='["README.md", "docs/*.md", "*/*.c", "*/*.h", "*/*/*.c", "*/*/*.h"]'
fi
OPENBLAS_NUM_THREADS=1 ./spillway train examples/demo.json --set "data.path=$paths"
echo
echo "--- text drawn from the checkpoint ---"
OPENBLAS_NUM_THREADS=1 ./spillway generate demo-out --prompt "The " --tokens 120 --temperature 0.7 --top-k 40
