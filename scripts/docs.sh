#!/usr/bin/env bash
# Runs MkDocs in an environment of its own, which needs neither PyTorch, TensorFlow nor Horovod.
#
#   scripts/docs.sh build      the site, in site/; warnings are errors, broken links and anchors too
#   scripts/docs.sh serve      the site at http://127.0.0.1:8000, made anew when a page changes
#
# The first run builds .docs-venv from requirements/docs.txt. Later runs need no network.
#
#   PYTHON   the Python 3.11, or later, to use   (default: python3.11, then python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.docs-venv
REQUIREMENTS=requirements/docs.txt

say() { printf 'docs: %s\n' "$*"; }

install() {
    local stamp=$VENV/environment.stamp key python
    key=$(cat "$REQUIREMENTS" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-16)
    if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then return; fi
    say "building the environment in $VENV"
    python=${PYTHON:-$(command -v python3.11 || command -v python3)}
    [[ -x $VENV/bin/python ]] || "$python" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -r "$REQUIREMENTS"
    echo "$key" >"$stamp"
}

export NO_MKDOCS_2_WARNING=1  # advertisement of Material's makers
install
[[ $1 == build ]] && set -- "$@" --strict
exec "$VENV/bin/mkdocs" "$@"
