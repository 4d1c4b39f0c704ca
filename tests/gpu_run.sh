#!/bin/sh
# On the GPU machine, beside bin/ and lib/: run.sh [test|sanitize|bench|all]. Needs the driver; cuBLASLt of the toolkit where it is.
# Exits 77 where there is no GPU, with the line that says why.
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
SPW_CUDA_PLUGIN=$here/lib/spillway-cuda.so
export LD_LIBRARY_PATH SPW_CUDA_PLUGIN
what=${1:-all} failed=0
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv,noheader 2>/dev/null
step() { # name seconds command...
    name=$1 limit=$2
    shift 2
    echo "== $name"
    timeout -s KILL "$limit" "$@"
    rc=$?
    [ $rc -eq 77 ] && exit 77
    [ $rc -ne 0 ] && { echo "== $name failed ($rc)"; failed=1; }
}
if [ "$what" = test ] || [ "$what" = all ]; then
    step "operations beside the cpu device" 400 env CMOCKA_MESSAGE_OUTPUT=STDOUT "$here/bin/test_cuda"
fi
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ "$what" = sanitize ] || [ "$what" = all ]; then
    if [ -n "$sanitizer" ]; then
        step "memcheck" 400 env SPW_CUDA_BLAS=0 "$sanitizer" --tool memcheck --error-exitcode 1 "$here/bin/test_cuda" --small
        step "racecheck" 400 env SPW_CUDA_BLAS=0 "$sanitizer" --tool racecheck --error-exitcode 1 "$here/bin/test_cuda" --small
    else
        echo "== no compute-sanitizer here"
    fi
fi
if [ "$what" = bench ] || [ "$what" = all ]; then
    step "bench" 300 "$here/bin/bench_gpu" cuda
fi
exit $failed
