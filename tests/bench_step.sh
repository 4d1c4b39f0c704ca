#!/bin/sh
# Training steps with state on host, on nvme and in between, compute-bound and disk-bound, interleaved in one run. Of each run the
# steps from the fourth on count, together, because what one step leaves to be written the next one pays for; shown are medians
# over the runs (few tokens: twice as many) of eta (bounds over time), of the time over all-host's (many tokens: of the run beside it),
# and of what the computing thread waited for.
# Disks are measured between all runs, because what they deliver changes from second to second: a run's bound is the mean of what
# the measurements before and after it say. Fails where eta is below 0.85 (with clipping) or many tokens take more than 1.05 of
# all-host's time. usage: bench_step.sh [ROUNDS] [FOLDER]
set -eu
cd "$(dirname "$0")/.."
rounds=${1:-5}
dir=$(mktemp -d "${2:-${TMPDIR:-/tmp}}/spw-bench-XXXXXX")
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/swap"
export XDG_CACHE_HOME="$dir/cache"
cp docs/DESIGN.md "$dir/text"
all() { # command, then settings
    command=$1
    shift
    ./spillway "$command" examples/demo.json --set "data.path=$dir/text" --set spillway.checkpoint_dir= \
        --set spillway.eval_interval=0 --set spillway.device_memory=auto --set spillway.run_log="$dir/log" \
        --set zero_optimization.offload_param.nvme_path="$dir/swap" --set zero_optimization.offload_optimizer.nvme_path="$dir/swap" \
        --set spillway.host_memory=auto "$@"
}
predicted() { sed -n 's/.*predicted step \([0-9.e-]*\) s.*/\1/p'; }
one() { # name, then settings: lines of step_s eta bound_by compute other reading writing h2d d2h optimizer
    name=$1
    shift
    before=$(all plan "$@" | predicted)
    all train "$@" --set spillway.steps="$steps" --quiet >/dev/null
    after=$(all plan --calibrate "$@" | predicted)
    sed -n 's/.*"step":\([0-9]*\),.*"step_s":\([0-9.e-]*\),.*"bound_by":"\([a-z_]*\)","eta":\([0-9.e-]*\),.*"compute_s":\([0-9.e-]*\),"stall_s":{"nvme_read":\([0-9.e-]*\),"nvme_write":\([0-9.e-]*\),"h2d":\([0-9.e-]*\),"optimizer":\([0-9.e-]*\),"d2h":\([0-9.e-]*\),.*"other_s":\([0-9.e-]*\),.*/\1 \2 \4 \3 \5 \6 \7 \8 \9 &/p' "$dir/log" |
        sed 's/{.*"d2h":\([0-9.e-]*\),"coll.*"other_s":\([0-9.e-]*\),.*/\1 \2/' | awk -v rates="$before $after" '
        $1 > 3 { n++; t += $2; b += $2 * $3; by[$4]++; for (k = 5; k <= 11; k++) s[k] += $k }
        END { for (x in by) if (by[x] > most) { most = by[x]; bound = x }
              split(rates, r, " ")
              printf "%d %.6g %.6g %s", n, t / n, b / t * (r[1] + r[2]) / 2 / r[1], bound
              for (k = 5; k <= 11; k++) printf " %.6g", s[k] / n
              print "" }' >>"$dir/$name"
}
median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
column() { awk -v k="$2" '{ print $k }' "$dir/$1" | median; }
share() { awk -v k="$2" '{ print 100 * $k / $2 }' "$dir/$1" | median; }
few='--set train_micro_batch_size_per_gpu=1 --set gradient_accumulation_steps=1 --set data.seq_length=16'
failed=
records='--set zero_optimization.offload_param.device=cpu'
host="$records --set zero_optimization.offload_optimizer.device=cpu"
half='--set spillway.host_memory=130MiB'
last_s() { tail -1 "$dir/$1" | cut -d' ' -f2; }
pair() { # place: a run of it and one of all-host beside it, in turns first; their ratio
    case $1 in
        records) settings=$records ;;
        half) settings=$half ;;
        *) settings= ;;
    esac
    if [ $((round % 2)) = 0 ]; then
        one host-many $host
        one "$1-many" $settings
    else
        one "$1-many" $settings
        one host-many $host
    fi
    echo "$(last_s "$1-many") $(last_s host-many)" | awk '{ print $1 / $2 }' >>"$dir/ratio-$1"
}
all plan --calibrate >/dev/null
for round in $(seq "$rounds"); do
    steps=9
    for place in records all half; do
        pair $place
    done
    steps=48
    for more in "$few" "$few --set gradient_clipping=0" "$few" "$few --set gradient_clipping=0"; do
        case $more in *clipping*) tokens=unclipped ;; *) tokens=few ;; esac
        one host-$tokens $host $more
        one records-$tokens $records $more
        one all-$tokens $more
        one half-$tokens $half $more
    done
done
echo "# bench step  10.8 M parameters, split, cpu device; medians of $rounds runs, $((2 * rounds)) with few tokens, interleaved"
echo "#  tokens  on nvme       step s  of host's    eta  bound by    computing  waiting for: nvme read  write    h2d  optimizer    d2h  other"
for tokens in many few unclipped; do
    n=2048
    [ $tokens = many ] || n=16
    [ $tokens = unclipped ] && echo "#  without clipping, where updates need not wait for the norm of the whole gradient:"
    for place in host records all half; do
        f=$place-$tokens
        ratio=$(awk -v a="$(column $f 2)" -v b="$(column host-$tokens 2)" 'BEGIN { print a / b }')
        [ ! -e "$dir/ratio-$place" ] || [ $tokens != many ] || ratio=$(median <"$dir/ratio-$place")
        printf '   %6d  %-10s %9.4f %10.3f %6.2f  %-10s %8.1f%% %23.1f%% %5.1f%% %5.1f%% %9.1f%% %5.1f%% %5.1f%%\n' $n \
            "$(echo $place | sed 's/host/nothing/')" "$(column $f 2)" "$ratio" \
            "$(column $f 3)" "$(awk '{ n[$4]++; if (n[$4] > m) { m = n[$4]; b = $4 } } END { print b }' "$dir/$f")" "$(share $f 5)" \
            "$(share $f 6)" "$(share $f 7)" "$(share $f 8)" "$(share $f 9)" "$(share $f 10)" "$(share $f 11)"
        [ $tokens = unclipped ] || awk -v eta="$(column $f 3)" -v ratio="$ratio" -v tokens=$tokens 'BEGIN {
            exit eta < 0.85 || (tokens == "many" && ratio > 1.05) }' || failed="$failed $f"
    done
done
[ -z "$failed" ] || { echo "# FAILED:$failed: eta below 0.85, or the time above 1.05 of all-host's" && exit 1; }
