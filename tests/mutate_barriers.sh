#!/bin/bash
# Would the detector of races miss a barrier? Each __syncthreads() and __syncwarp() of the kernels, one at a time, is still waited at in the
# emulation, and taken to order nothing. Prints what test found it; SURVIVED is a barrier that nothing needs, or no test's shapes do. After
# make races; half an hour. usage: mutate_barriers.sh [PATTERN OF file:line]
set -u
cd "$(dirname "$0")/.." || exit 1
pattern=${1:-.} test=build/checked/tests/test_cuda_emulated
[ -f build/checked/races/spillway-cuda.so ] || { echo "make races comes first" && exit 1; }
grep -nE '__sync(threads|warp)\(\);' -r gpu/cuda | cut -d: -f1,2 | grep -E "$pattern" | sort -t: -k1,1 -k2,2n |
    while IFS= read -r site; do
        capability=89
        case $site in
        *hopper*) capability=90 && groups='test_attention test_attention_bits test_linear_each' ;;
        *attention*) groups='test_attention test_attention_cached test_chunks test_attention_bits' ;;
        *choice*) groups=test_choose_keys ;;
        *delta*) groups='test_delta test_delta_cached test_delta_turns' ;;
        *each* | *row_moves*) groups=test_linear_each ;; # and transposes
        *experts*) groups=test_experts ;;
        *fp8*) groups=test_fp8 ;;
        *gemm*) groups='test_linear test_linear_and_more test_orthogonal' ;;
        *norms*) groups='test_norms test_elements' ;;
        *optimizer*) groups='test_update test_orthogonal' ;;
        *preference*) groups=test_preference ;;
        *rows*) groups=test_embedding_and_rope ;;
        *sums*) groups=test_copies ;;
        *) groups='test_loss test_norms test_experts test_elements test_preference test_head' ;;
        esac
        by=SURVIVED
        for group in $groups; do
            SPW_EMULATE_CAPABILITY=$capability SPW_EMULATE_RACES=first SPW_EMULATE_WITHOUT=$site "$test" --only "$group" >/dev/null 2>&1
            [ $? -eq 66 ] && by=$group && break
        done
        echo "$site $by"
    done
