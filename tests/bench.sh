#!/bin/sh
# make bench: nothing here is a test; ratios within one run are what counts.
set -eu
cd "$(dirname "$0")/.."
build/release/tests/bench_adam
sh tests/bench_step.sh
