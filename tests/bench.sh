#!/bin/sh
# make bench: nothing here is a test; ratios within one run are what counts.
set -eu
cd "$(dirname "$0")/.."
./spillway bench adam --threads 1
sh tests/bench_step.sh
