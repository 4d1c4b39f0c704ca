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
world() { # runs four ranks, two in each; what else to set, in which @ is the host
    pids=
    for r in 0 1 2 3; do
        ns=$(host_of $r 4)
        timeout -s KILL 200 ip netns exec $ns env RANK=$r WORLD_SIZE=4 MASTER_ADDR=10.77.0.1 MASTER_PORT=29511 SPW_HOST=$ns "${@//@/$ns}" \
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
    world SPW_TEST_BRIEF=1 MASTER_ADDR=spw-first SPW_JOIN_TIMEOUT=20
    for p in $pids; do wait "$p" || bad=1; done
    tell $bad "rank 0 is found by a name that its own host takes for a loopback address"
    echo "10.77.0.1 spw-first" >/etc/netns/$a/hosts
    printf '10.77.0.3 spw-first\n10.77.0.1 spw-first\n' >/etc/netns/$b/hosts
    ip -n $b neigh add 10.77.0.3 lladdr 02:00:00:00:00:03 dev v$b # nobody, and nobody says so
    bad=0
    world SPW_TEST_BRIEF=1 MASTER_ADDR=spw-first SPW_JOIN_TIMEOUT=30
    for p in $pids; do wait "$p" || bad=1; done
    tell $bad "rank 0 is found behind an address of its name that does not answer"
    rm -rf /etc/netns/$a /etc/netns/$b
fi
# Interfaces of another number on either host.
if ip -n $b link add x type veth peer name y 2>/dev/null && ip link add w$a netns $a type veth peer name w$b netns $b 2>/dev/null &&
    ip -n $a addr add fe80::77:1/64 dev w$a nodad 2>/dev/null && ip -n $b addr add fe80::77:2/64 dev w$b nodad 2>/dev/null; then
    ip -n $a link set w$a up && ip -n $b link set w$b up
    bad=0
    world SPW_TEST_BRIEF=1 MASTER_ADDR=fe80::77:1%w@ SPW_JOIN_TIMEOUT=30
    for p in $pids; do wait "$p" || bad=1; done
    tell $bad "ranks find each other by addresses of one link"
fi
# With few ports to choose from, a rank that comes before rank 0 soon has the port that it connects to for its own.
ports=$(ip netns exec $a sysctl -n net.ipv4.ip_local_port_range)
if ip netns exec $a sysctl -qw net.ipv4.ip_local_port_range="29512 29527" 2>/dev/null; then
    bad=0
    for r in 1 0; do
        timeout -s KILL 200 ip netns exec $a env RANK=$r WORLD_SIZE=2 MASTER_ADDR=10.77.0.1 MASTER_PORT=29512 SPW_JOIN_TIMEOUT=30 SPW_TEST_BRIEF=1 \
            "$bin" rank >"$log/$r" 2>&1 </dev/null &
        eval "p$r=$!"
        sleep 1
    done
    wait "$p0" || bad=1
    wait "$p1" || bad=1
    tell $bad "a rank does not take itself for rank 0"
    ip netns exec $a sysctl -qw net.ipv4.ip_local_port_range="$ports"
fi
bad=0
world SPW_TEST_BRIEF=1 SPW_TEST_FAILURE=6 SPW_TEST_CUT=1
for i in $(seq 600); do [ -f "$log/0" ] && grep -q ready "$log"/0 && break; sleep 0.1; done
ip -n $b link set v$b down
for p in $pids; do wait "$p" || bad=1; done
tell $bad "a network that goes away ends in an error on every rank"
