#!/bin/bash
# The checks of test_comm.c with an MPI launcher and its library: ranks on one host, on two, each on its own, so that data
# really goes through MPI; then failures. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
bin=${SPW_BUILD:-build/checked}/tests/test_comm
command -v mpirun >/dev/null 2>&1 || { echo "ok 1 - MPI # SKIP no mpirun; to add it: apt install openmpi-bin libopenmpi-dev"; exit 0; }
[ -f "$(dirname "$bin")/../spillway-mpi.so" ] || { echo "ok 1 - MPI # SKIP built without MPI"; exit 0; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
export LSAN_OPTIONS=suppressions=$PWD/tests/lsan_mpi.txt:print_suppressions=0:leak_check_at_exit=0 SPW_TEST_LEAKS=1
export ASAN_OPTIONS=${ASAN_OPTIONS:-}:fast_unwind_on_malloc=0 # whole stacks: libraries are built without frame pointers
export TSAN_OPTIONS=${TSAN_OPTIONS:-}:ignore_noninstrumented_modules=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
n=0
launch() { # host-expression, then what else to set
    host=$1
    shift
    timeout -s KILL 200 env "$@" mpirun -n 4 --oversubscribe sh -c "SPW_HOST=$host exec '$bin' rank" >"$log" 2>&1 </dev/null
}
tell() { # good, name
    n=$((n + 1))
    if [ "$1" -eq 0 ]; then echo "ok $n - $2"; else echo "not ok $n - $2"; head -n 40 "$log" | sed 's/^/# /'; fi
}
# Open MPI's launcher calls it an improper end when it did not run for the 2 s that a rank's PMIx_Finalize waits for its answer
# (as happens on a machine with ten times the work it can do; stopping mpirun by a signal at that moment shows it). Then
# what ranks say at their very end counts: all four have left MPI.
for mix in 'x:four ranks on one host' '$((OMPI_COMM_WORLD_RANK/2)):two hosts' '$OMPI_COMM_WORLD_RANK:each on its own host'; do
    launch "${mix%%:*}" A=1 || grep -q 'exiting improperly' "$log"
    rc=$?
    grep -q '^ok 1' "$log" && [ "$(grep -c '^# finalized' "$log")" -eq 4 ] || rc=1
    tell $rc "${mix#*:}"
done
# A world that failed does not finalize, and mpirun ends with an error of its own: what ranks say is what counts. The
# one that is late is ended by mpirun before it can say anything.
for failure in 1:skipped 3:unit 5:abort 6:late; do
    launch '$((OMPI_COMM_WORLD_RANK/3))' SPW_TEST_BRIEF=1 SPW_TEST_FAILURE="${failure%%:*}" SPW_TEST_SHOW=1
    [ "$(grep -c '^# rank' "$log")" -ge "$([ "$failure" = 6:late ] && echo 3 || echo 4)" ] && ! grep -q 'test_comm.c:' "$log"
    tell $? "every rank learns of a failure: ${failure#*:}"
done
timeout -s KILL 100 mpirun -n 2 --oversubscribe "$bin" link >"$log" 2>&1 </dev/null || grep -q 'exiting improperly' "$log"
rc=$?
grep -q '^ok 1' "$log" && [ "$(grep -c '^# finalized' "$log")" -eq 2 ] || rc=1
tell $rc "nothing lands where a link that was closed was to receive"
launch x SPW_MPI_PLUGIN=/nowhere/spillway-mpi.so
grep -q 'MPI is not there: SPW_MPI_PLUGIN: /nowhere' "$log"
tell $? "without the plugin ranks say what is missing"
# Variables of another MPI's launcher, which this library does not know: each process would be a world of one.
for set in 'PMI_SIZE=2 PMI_RANK=0' 'PMIX_RANK=0 SLURM_STEP_NUM_TASKS=2'; do
    timeout -s KILL 60 env $set "$bin" rank >"$log" 2>&1 </dev/null
    grep -q 'a launcher started 2 processes.* finds 1: .*use this one.s mpirun' "$log"
    tell $? "the launcher of another MPI is refused: ${set%% *}"
done
# Inside another launcher's process the inner mpirun counts.
for ranks in 1 2; do
    timeout -s KILL 200 env SPW_TEST_BRIEF=1 PMI_SIZE=3 PMI_RANK=0 mpirun -n $ranks --oversubscribe "$bin" rank >"$log" 2>&1 </dev/null ||
        grep -q 'exiting improperly' "$log"
    rc=$?
    grep -q '^ok 1' "$log" || rc=1
    tell $rc "mpirun -n $ranks in another launcher's process"
done
