#!/usr/bin/env bash
# mypy over the package as it is installed, and over the benchmarks, which use its insides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/package_tree.sh "$PWD/.venv/bin/mypy" --config-file "$PWD/pyproject.toml" --cache-dir "$PWD/.mypy_cache" \
    -p horovod_oktopk -p benchmarks
