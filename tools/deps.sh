#!/bin/sh
# Makes sure that the compiler and the libraries are there: installs with apt when it may, else says the command. usage: deps.sh [TOOL...]
# Tools are what tests need besides, named like their packages: what is missing of these costs tests, no build.
set -u
missing=""
command -v pkg-config >/dev/null 2>&1 || missing="$missing pkg-config"
command -v "${CC:-gcc}" >/dev/null 2>&1 || missing="$missing gcc"
if [ -z "$missing" ]; then
    for pair in openblas:libopenblas-dev numa:libnuma-dev jansson:libjansson-dev libxxhash:libxxhash-dev libisal:libisal-dev \
        libpcre2-8:libpcre2-dev libutf8proc:libutf8proc-dev \
        cmocka:libcmocka-dev liburing:liburing-dev; do
        pkg-config --exists "${pair%%:*}" 2>/dev/null || missing="$missing ${pair#*:}"
    done
else
    missing="$missing libopenblas-dev libnuma-dev libjansson-dev libxxhash-dev libisal-dev libpcre2-dev libutf8proc-dev libcmocka-dev liburing-dev"
fi
# MPI is asked for once, with the rest or alone; a machine that will not have it builds without.
if [ "${MPI:-}" != 0 ] && ! pkg-config --exists ompi-c 2>/dev/null && ! command -v mpicc >/dev/null 2>&1; then
    missing="$missing libopenmpi-dev openmpi-bin"
fi
for tool in "$@"; do command -v "$tool" >/dev/null 2>&1 || missing="$missing $tool"; done
[ -z "$missing" ] && exit 0
if command -v apt-get >/dev/null 2>&1; then
    sudo=""
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    if [ -z "$sudo" ] || sudo -n true 2>/dev/null; then
        echo "installing with apt:$missing"
        { $sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq $missing; } >/dev/null 2>&1 && exit 0
        echo "apt-get could not install them."
    fi
fi
cat <<MSG
These packages are missing:$missing
  Debian, Ubuntu:  sudo apt-get install gcc make pkg-config libopenblas-dev libnuma-dev libjansson-dev libxxhash-dev libisal-dev libpcre2-dev libutf8proc-dev liburing-dev libcmocka-dev
  Fedora, RHEL:    sudo dnf install gcc make pkgconf openblas-devel numactl-devel jansson-devel xxhash-devel isa-l-devel pcre2-devel utf8proc-devel liburing-devel libcmocka-devel
  Arch:            sudo pacman -S gcc make pkgconf openblas numactl jansson xxhash isa-l pcre2 libutf8proc liburing cmocka
MSG
needed=""
for p in $missing; do
    case $p in
    liburing-dev) echo "no liburing: aio uses threads; to add it: apt install liburing-dev" ;;
    openmpi-bin) ;;
    python3 | g++) echo "no $p: tests that need it are skipped; to add it: apt install $p" ;;
    libopenmpi-dev) echo "no MPI: ranks talk over sockets; to add it: apt install libopenmpi-dev openmpi-bin" ;;
    *) needed="$needed $p" ;;
    esac
done
[ -z "$needed" ]
