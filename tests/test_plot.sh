#!/bin/bash
# spillway plot: the picture holds every row where it belongs, and bad input is named by file and line. TAP.
set -u
cd "$(dirname "$0")/.."
build=${SPW_BUILD:-build/release}
spw=$build/spillway
dir=$(mktemp -d "${TMPDIR:-/tmp}/spw-plot-XXXXXX")
trap 'rm -rf "$dir"' EXIT
. tests/lib_tap.sh
plot() { run plot "$dir/$1" -o "$dir/${2:-out.svg}"; }
# refuse TEXT NAME: what stands on standard input is refused, with file and TEXT in the message, and the old picture stays.
refuse() {
    cat >"$dir/bad.json"
    echo old >"$dir/bad.svg"
    plot bad.json bad.svg
    local got=$?
    if [ $got -eq 1 ] && grep -qF -- "bad.json" "$dir/err" && grep -qF -- "$1" "$dir/err" && [ "$(cat "$dir/bad.svg")" = old ]; then
        ok "$2"
    else
        echo "# exit $got, wanted 1; message should hold: $1"
        bad "$2"
    fi
}
usage() { # TEXT NAME ARGS...
    local text=$1 name=$2
    shift 2
    run "$@"
    check "$name" test $? -eq 2 -a -n "$(grep -F -- "$text" "$dir/err")"
}

# Three patterns, three lines each, 64 KiB to 4 MiB; a header, an empty line and a line about something else among them.
python3 - "$dir" <<'PY'
import json, sys
rows = []
for pattern in ("read", "write", "mixed"):
    for path, backend, depth in (("/mnt/a", "io_uring", 8), ("/mnt/a", "io_uring", 1), ('/mnt/<b>&"\x01\uffff\u00e9', "threads", 8)):
        for k in (16, 18, 20, 22):
            rows.append({"pattern": pattern, "path": path, "backend": backend, "block": 1 << k, "depth": depth,
                         "gb_s": (k - 15) * 0.4 + depth / 10, "p50_us": 1.5, "p99_us": 2, "cpu_s_per_gb": 0.008, "other": None})
d = sys.argv[1]
lines = [json.dumps(r, ensure_ascii=False) for r in rows]
lines[5:5] = ["", '  {"chosen": {"block": 1}}\r']
open(d + "/io.json", "w").write('{"header": {"bench": "io"}}\n' + "\n".join(lines))
json.dump([{"header": {}}] + rows, open(d + "/array.json", "w"), indent=1)
open(d + "/one.json", "w").write("\n".join(json.dumps(r) for r in rows if r["block"] == 1 << 18) + "\n")
open(d + "/copy.json", "w").write("\n".join(json.dumps({"op": op, "size": 1 << k, "gb_s": k, "ceiling_gb_s": k + 0.5, "wrong": 0})
                                            for op in ("h2d", "d2h") for k in (18, 22, 26)))
open(d + "/many.json", "w").write("\n".join(json.dumps(dict(rows[0], depth=i)) for i in range(257)))
PY
check "lines" plot io.json io.svg
# Reads an SVG back: panels, and each marker's or bar's place against its own caption.
shape() {
    python3 - "$@" <<'PY'
import math, re, sys
import xml.etree.ElementTree as E
file, panels, series, marks, kind = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
text = open(file, encoding="utf-8").read()
assert not re.search(r"<script|@font-face|href|<style|<image|\son\w+=", text)
ns = "{http://www.w3.org/2000/svg}"
root = E.fromstring(text)
groups = root.findall(ns + "g")
assert len(groups) == panels, len(groups)
units = {"": 0, "K": 10, "M": 20, "G": 30}
seen = 0
for g in groups:
    ys, xs = [], []
    for e in g:
        t = e.find(ns + "title")
        if t is None:
            continue
        assert e.tag == ns + ("rect" if kind == "bars" else "path")
        size, unit, rate = re.search(r": ([\d.]+)([KMG]?), ([\d.]+) GB/s \(line \d+\)$", t.text).groups()
        y = float(e.get("y")) if kind == "bars" else float(re.match(r"M[\d.]+ ([\d.]+)", e.get("d")).group(1))
        ys.append((float(rate), y))
        if kind == "lines":
            xs.append((math.log2(float(size)) + units[unit], float(re.match(r"M([\d.]+)", e.get("d")).group(1))))
        else:
            assert abs(float(e.get("height")) + y - 220) < 0.11
        seen += 1
    ticks = {float(e.text): float(e.get("y")) - 4 for e in g.findall(ns + "text") if e.get("text-anchor") == "end"}
    (r1, y1), (r2, y2) = sorted(ticks.items())[0], sorted(ticks.items())[-1]
    assert r1 == 0 and r2 >= max(r for r, _ in ys), (ticks, ys)
    for r, y in ys:
        assert abs(y - (y1 + (y2 - y1) * r / r2)) < 0.25, (r, y, ticks)
    words = [e.text for e in g.findall(ns + "text")]
    assert "GB/s" in words
    if kind == "lines":
        (a, xa), (b, xb) = min(xs), max(xs)
        for k, x in xs:
            assert abs(x - (xa + (xb - xa) * (k - a) / (b - a))) < 0.25, (k, x)
assert seen == marks, seen
legend = [e.text for e in root.findall(ns + "text") if re.match(r"\d+  ", e.text)]
assert len(legend) == series, legend
PY
}
check "3 panels, 3 lines, 36 markers in their places" shape "$dir/io.svg" 3 3 36 lines
check "log2 ticks" grep -q ">64K<" "$dir/io.svg"
check "and so on" grep -q ">256K<.*" "$dir/io.svg"
check "up to megabytes" grep -q ">4M<" "$dir/io.svg"
check "text is escaped" grep -q '/mnt/&lt;b&gt;&amp;&quot;????é  threads  depth 8' "$dir/io.svg"
check "nothing is left beside it" test -z "$(find "$dir" -name '*tmp*')"
check "an array over many lines" plot array.json array.svg
check "is the same picture" shape "$dir/array.svg" 3 3 36 lines
check "the same input" plot io.json again.svg
check "gives the same bytes" cmp -s "$dir/io.svg" "$dir/again.svg"
check "one block size" plot one.json one.svg
check "makes bars" shape "$dir/one.svg" 3 3 9 bars
check "rows of bench copy" plot copy.json copy.svg
check "make a panel per op, with the ceiling" shape "$dir/copy.svg" 2 2 12 lines
printf '{"op":"x","size":1,"gb_s":0}' >"$dir/zero.json"
check "a rate of 0 without a newline" plot zero.json zero.svg
check "is a bar without height" shape "$dir/zero.svg" 1 1 1 bars
cp "$dir/io.json" "$dir/$(printf 'f\377<.json')"
check "a file name that is no text" plot "$(printf 'f\377<.json')" name.svg
check "is still XML" shape "$dir/name.svg" 3 3 36 lines

# Bad input: file and line.
row='{"pattern":"read","path":"/a","backend":"threads","block":4096,"depth":1,"gb_s":1.5}'
refuse "line 3" "bad JSON" <<<"$row"$'\n\n{"pattern": '
refuse "line 2" "two objects on a line" <<<"$row"$'\n'"$row $row"
refuse "line 2" "a key twice" <<<"$row"$'\n{"pattern":"a","pattern":"b"}'
refuse "line 2: not a JSON object" "a number alone" <<<"$row"$'\n7'
refuse "line 4" "bad JSON in an array" <<<$'[\n'"$row,"$'\n{"header":\n?}]'
refuse "line 3: a comma" "an array without a comma" <<<$'[\n'"$row"$'\n'"$row]"
refuse "line 2" "a cut array" <<<"[$row,"
refuse "line 1: a comma" "an array without an end" < <(printf '[%s' "$row")
refuse "line 2: text after" "text after an array" <<<"[$row]"$'\n'"$row"
refuse "no rows" "an empty file" </dev/null
refuse "no rows" "an empty array" <<<"[]"
refuse "no rows" "a header alone" <<<'{"header":{}}'
refuse "line 2" "NaN" <<<"$row"$'\n'"${row/1.5/NaN}"
refuse "line 2" "an infinite number" <<<"$row"$'\n'"${row/1.5/1e999}"
refuse "line 2: gb_s is -1.5" "a negative number" <<<"$row"$'\n'"${row/1.5/-1.5}"
refuse "line 1: p99_us is -1" "a negative number that is not drawn" <<<"${row/\"depth\"/\"p99_us\":-1,\"depth\"}"
refuse "line 1: gb_s is not a number" "a rate as text" <<<"${row/1.5/\"1.5\"}"
for field in path backend block depth; do
    refuse "line 1: $field is missing" "without $field" <<<"${row/$field/no$field}"
done
refuse "line 1: size is missing" "an op without size" <<<'{"op":"h2d","gb_s":1}'
refuse "line 1: block is not" "block 0" <<<"${row/4096/0}"
refuse "line 1: block is not" "half a block" <<<"${row/4096/0.5}"
refuse "line 1: path is not" "a path that is a number" <<<"${row/\"\/a\"/5}"
refuse "line 1" "an integer beyond 64 bits" <<<"${row/4096/99999999999999999999}"
refuse "line 2: a zero byte" "a zero byte" < <(printf '%s\n\0%s\n' "$row" "$row")
refuse "line 1" "bytes that are not UTF-8" < <(printf '%s' "${row/read/r$'\377'd}")
refuse "line 257: no room for another line" "too many lines for one picture" <"$dir/many.json"

# Files that cannot be read or written, and wrong usage.
check "a missing file" test -n "$(! plot none.json && grep "none.json.*No such file" "$dir/err")"
check "a missing folder for the picture" test -n "$(! plot io.json no/x.svg && grep "no/x.svg.*No such file" "$dir/err")"
mkdir "$dir/folder"
check "a folder in the picture's place" test -n "$(! plot io.json folder && grep "folder" "$dir/err")"
check "leaves nothing behind" test -z "$(find "$dir" -name '*tmp*')"
usage "-o OUT.svg is needed" "no -o" plot "$dir/io.json"
usage "needs a value" "-o without a name" plot "$dir/io.json" -o
usage "a file" "no input" plot -o "$dir/x.svg"
usage "one file at a time" "two inputs" plot "$dir/io.json" "$dir/one.json" -o "$dir/x.svg"
usage "unknown option" "an unknown option" plot "$dir/io.json" --out x
usage "overwritten" "the input as output" plot "$dir/io.json" -o "$dir/../$(basename "$dir")/io.json"
check "help" run help plot
echo "1..$n"
