#!/bin/bash
# Are the tests able to miss a wait? Takes each place of runtime and offload where a queue or a thread waits for another queue out of a copy
# of the tree, one at a time, builds, and runs tests on the emulated device until one fails. Prints what found it; SURVIVED is a
# wait that nothing needs or that no test would miss. About two minutes each. usage: mutate_waits.sh [PATTERN OF file:line]
set -u
cd "$(dirname "$0")/.." || exit 1
pattern=${1:-.}
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-mutants-XXXXXX")
trap 'rm -rf "$dir"' EXIT
git ls-files -z | xargs -0 cp --parents -t "$dir"
cd "$dir" || exit 1
export SPW_BUILD=$dir/build/checked
build() { make -j"$(nproc)" objects tests VARIANT=checked CUDA=0 EXTRA_CFLAGS="-Wno-error -Wno-unused" >"$dir/log" 2>&1; }
finds() { # test: it fails
    case $1 in
    *.sh) timeout -s KILL 300 bash "tests/$1" 2>/dev/null | grep -q '^not ok' ;;
    *) ! timeout -s KILL 300 "$SPW_BUILD/tests/$1" >/dev/null 2>&1 ;;
    esac
}
build || { tail -n 5 "$dir/log"; exit 1; }
grep -nE 'spw_gpu_(event_wait|event_sync|queue_sync|link_wait)\(' -r runtime offload --include=*.c | grep -vE "calibrate|rank_bench" | cut -d: -f1,2 | grep -E "$pattern" |
    while IFS=: read -r file line; do
        case $file in
        *wire_* | *links*) tests="test_emulated_ranks.sh test_ranks test_mics test_zeropp" ;;
        *engine_extend*) tests="test_emulated_training.sh" ;;
        *orthogonal*) tests="test_muon.sh" ;; # ranks too
        *) tests="test_random_runs test_device_state test_chains test_cuda_host test_activations test_gather test_access test_ranks" ;;
        esac
        cp "$file" "$dir/whole"
        sed -i -E "${line}s/spw_gpu_(event_wait|event_sync|queue_sync)\(/(void)(/; ${line}s/spw_gpu_link_wait\([^)]*\)/SPW_OK/" "$file"
        by=SURVIVED
        if ! build; then by="does not build: $(grep -m1 error "$dir/log")"; else
            for test in $tests; do finds "$test" && by=$test && break; done
        fi
        echo "$file:$line $by"
        cp "$dir/whole" "$file"
    done
