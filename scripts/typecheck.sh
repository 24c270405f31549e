#!/usr/bin/env bash
# mypy over the package as it is installed: integrations/<framework> is horovod_oktopk.<framework>.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp -r horovod_oktopk "$tree/"
for framework in integrations/*/; do cp -r "$framework" "$tree/horovod_oktopk/"; done
config=$PWD/pyproject.toml mypy=$PWD/.venv/bin/mypy cache=$PWD/.mypy_cache
cd "$tree"
"$mypy" --config-file "$config" --cache-dir "$cache" -p horovod_oktopk
