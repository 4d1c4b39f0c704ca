#!/bin/bash
# The tests of aio again where it is tight: locked memory of 0, 64 and 8192 KiB without the right to exceed it, without
# O_DIRECT, disks with sectors of 512 and of 4096 bytes. Each of these runs every file test on every backend.
cd "$(dirname "$0")/.." || exit 1
bin=${SPW_BUILD:-build/checked}/tests
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-limits-XXXXXX")
loop=
n=0
cleanup() {
    mountpoint -q "$dir/mnt" 2>/dev/null && umount "$dir/mnt"
    [ -n "$loop" ] && losetup -d "$loop"
    rm -rf "$dir"
}
trap cleanup EXIT
export SPW_TEST_AIO_FEW=1 SPW_SCHEDULES=30 CMOCKA_MESSAGE_OUTPUT=TAP
modes="direct buffered" sectors="512 4096"
case $bin in *asan* | *tsan*) SPW_SCHEDULES=12 modes=direct sectors=512 ;; esac # memory errors of the paths; the rest runs without

say() { n=$((n + 1)); echo "$1 $n - $2"; }
# check NAME COMMAND...: both programs must pass. (Failing allocations are test_aio's own, without limits.) Every test of the
# threads backend must have run, and every one of io_uring too, unless rings were refused by name: this kernel counts the ring
# itself as locked memory, or has none, or they are forbidden, as in many containers.
refused='this build has no liburing|io_uring_setup: (ENOMEM, the memlock limit is 0 B|ENOSYS, |EPERM, )'
check() {
    local name=$1 prog log
    shift
    for prog in test_aio test_aio_faults; do
        log="$dir/$prog, $name"
        if "$@" "$bin/$prog" >"$log" 2>&1 && grep -q '^ok .*threads' "$log" && ! grep '^not ok' "$log" | grep -vqi '# skip' &&
            { grep -q '^ok .*io_uring' "$log" || grep -qE "$refused" "$log"; }; then
            say ok "$prog, $name"
        else
            say "not ok" "$prog, $name"
            grep -v '^ok' "$log" | tail -n 20 | sed 's/^/# /'
        fi
    done
}

# Root may lock more than the limit unless that right is taken away.
drop=
[ "$(id -u)" = 0 ] && command -v setpriv >/dev/null && drop="setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock"
for kib in 0 64 8192; do
    for mode in $modes; do
        [ $mode = direct ] || [ $kib = 64 ] || continue
        if [ "$(id -u)" = 0 ] && [ -z "$drop" ]; then
            say ok "memlock $kib KiB, $mode # skip root without setpriv exceeds every limit"
            continue
        fi
        if ! (ulimit -l $kib) 2>/dev/null; then
            say ok "memlock $kib KiB, $mode # skip the limit cannot be set"
            continue
        fi
        # shellcheck disable=SC2016
        if [ $mode = buffered ]; then
            check "memlock $kib KiB, $mode" env SPW_TEST_AIO_BUFFERED=1 bash -c "ulimit -l $kib && exec $drop "'"$0"'
        else
            check "memlock $kib KiB, $mode" bash -c "ulimit -l $kib && exec $drop "'"$0"'
        fi
    done
done

# At 64 KiB a region of 1 MiB cannot be registered: the log names what it needs and what the limit is.
log="$dir/test_aio, memlock 64 KiB, direct"
if [ -n "$drop" ] && ! grep -qE "$refused" "$log"; then
    if grep -q 'needs 1.00 MiB beside .*, and the memlock limit (ulimit -l) is 64.0 KiB' "$log"; then say ok "a refused registration names need and limit"; else say "not ok" "a refused registration names need and limit"; fi
fi

for sector in $sectors; do
    why=
    if [ "$(id -u)" != 0 ] || ! command -v losetup >/dev/null || ! command -v mkfs.ext4 >/dev/null; then
        why="needs root, losetup and mkfs.ext4"
    else
        truncate -s 256M "$dir/disk-$sector" && mkdir -p "$dir/mnt"
        loop=$(losetup -f --show -b $sector "$dir/disk-$sector" 2>/dev/null) || { loop= why="no loop device"; }
        if [ -z "$why" ] && ! { mkfs.ext4 -q "$loop" && mount "$loop" "$dir/mnt"; } >/dev/null 2>&1; then
            why="the loop device cannot be mounted"
        fi
    fi
    if [ -n "$why" ]; then
        say ok "sectors of $sector bytes # skip $why"
    else
        check "sectors of $sector bytes" env TMPDIR="$dir/mnt"
        umount "$dir/mnt"
    fi
    [ -n "$loop" ] && losetup -d "$loop"
    loop=
done
echo "1..$n"
