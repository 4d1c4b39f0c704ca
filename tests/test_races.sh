#!/bin/bash
# The detector of races in kernels (tests/emulate/races.h) finds those of small kernels that have one, and none in the same without. What
# it says of all kernels is make races. Speaks TAP.
set -u
cd "$(dirname "$0")/.."
control=${SPW_BUILD:-build/checked}/races/control
[ -x "$control" ] || { echo "1..0 # SKIP it is of the checked build, where there is a C++ compiler" && exit 77; }
exec "$control" 2>/dev/null
