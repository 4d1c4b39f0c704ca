# Sourced by what wants two hosts on one machine: network namespaces $a and $b, joined by a pair of interfaces, v$a and v$b. Needs iproute2 and the
# right to make namespaces.
a=spwa$$ b=spwb$$ why=
# two_hosts NET: with the addresses NET.1 and NET.2; false, and the reason in $why, where that is not possible.
two_hosts() {
    command -v ip >/dev/null 2>&1 || { why="no iproute2: no network namespaces"; return 1; }
    why=$({ ip netns add $a && ip netns add $b && ip link add v$a netns $a type veth peer name v$b netns $b; } 2>&1) ||
        { why="no network namespaces here: $(echo "$why" | head -n 1)"; return 1; }
    ip -n $a addr add "$1.1/24" dev v$a && ip -n $b addr add "$1.2/24" dev v$b
    for ns in $a $b; do ip -n $ns link set v$ns up && ip -n $ns link set lo up; done
}
# slow_hosts RATE BURST: the link lets no more through, either way.
slow_hosts() { for ns in $a $b; do ip netns exec $ns tc qdisc replace dev v$ns root tbf rate "$1" burst "$2" latency 50ms || return 1; done; }
end_hosts() { ip netns del $a 2>/dev/null; ip netns del $b 2>/dev/null; }
# host_of RANK RANKS: the first half of them is on $a.
host_of() { [ $((2 * $1)) -ge "$2" ] && echo $b || echo $a; }
