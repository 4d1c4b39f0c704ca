#!/bin/bash
# The checks of test_comm.c over a network between two hosts: two network namespaces joined by a pair of interfaces, two
# ranks in each. Then one host's interface goes down in the middle. Needs iproute2 and the right to make namespaces.
set -u
cd "$(dirname "$0")/.."
bin=${SPW_BUILD:-build/checked}/tests/test_comm
. tests/lib_hosts.sh
log=$(mktemp -d)
trap 'end_hosts; rm -rf "$log" /etc/netns/$a /etc/netns/$b' EXIT
two_hosts 10.77.0 || { echo "$why"; exit 77; }
world() { # runs four ranks, two in each; what else to set
    pids=
    for r in 0 1 2 3; do
        ns=$(host_of $r 4)
        timeout -s KILL 200 ip netns exec $ns env RANK=$r WORLD_SIZE=4 MASTER_ADDR=10.77.0.1 MASTER_PORT=29511 SPW_HOST=$ns "$@" \
            "$bin" rank >"$log/$r" 2>&1 </dev/null &
        pids="$pids $!"
    done
}
n=0
tell() {
    n=$((n + 1))
    if [ "$1" -eq 0 ]; then echo "ok $n - $2"; else echo "not ok $n - $2"; head -n 10 "$log"/[0-3] | sed 's/^/# /'; fi
}
bad=0
world A=1
for p in $pids; do wait "$p" || bad=1; done
tell $bad "two ranks on each of two networked hosts"
# As Debian installs it: the first host's name is 127.0.1.1 there, and its address elsewhere.
if mkdir -p /etc/netns/$a /etc/netns/$b 2>/dev/null; then
    echo "127.0.1.1 spw-first" >/etc/netns/$a/hosts
    echo "10.77.0.1 spw-first" >/etc/netns/$b/hosts
    bad=0
    world MASTER_ADDR=spw-first SPW_JOIN_TIMEOUT=20
    for p in $pids; do wait "$p" || bad=1; done
    tell $bad "rank 0 is found by a name that its own host takes for a loopback address"
    rm -rf /etc/netns/$a /etc/netns/$b
fi
bad=0
world SPW_TEST_FAILURE=6 SPW_TEST_CUT=1
for i in $(seq 600); do [ -f "$log/0" ] && grep -q ready "$log"/0 && break; sleep 0.1; done
ip -n $b link set v$b down
for p in $pids; do wait "$p" || bad=1; done
tell $bad "a network that goes away ends in an error on every rank"
