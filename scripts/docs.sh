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

# Draws the diagrams in the reader's browser. It is on no Python index; its licence (MIT) lies beside it.
MERMAID=https://registry.npmjs.org/mermaid/-/mermaid-11.17.2.tgz
MERMAID_SHA256=6ad2f42c3fc26bbf9e45cbb6d11898972573ea52b33a5f4ff51952899f950ffd

say() { printf 'docs: %s\n' "$*"; }

install_mermaid() {
    local archive=$VENV/mermaid.tgz
    curl --fail --silent --show-error --location --output "$archive" "$MERMAID"
    echo "$MERMAID_SHA256  $archive" | sha256sum --check --quiet
    mkdir -p "$VENV/mermaid"
    tar --extract --gzip --file "$archive" --directory "$VENV/mermaid" --strip-components=1 \
        package/LICENSE package/dist/mermaid.min.js
    rm "$archive"
}

install() {
    local stamp=$VENV/environment.stamp key python
    key=$(cat "$REQUIREMENTS" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-16)
    if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then return; fi
    say "building the environment in $VENV"
    python=${PYTHON:-$(command -v python3.11 || command -v python3)}
    [[ -x $VENV/bin/python ]] || "$python" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -r "$REQUIREMENTS"
    install_mermaid
    echo "$key" >"$stamp"
}

export NO_MKDOCS_2_WARNING=1  # advertisement of Material's makers
install
[[ $1 == build ]] && set -- "$@" --strict
exec "$VENV/bin/mkdocs" "$@"
