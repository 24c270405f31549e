#!/usr/bin/env bash
# The contracts of imports in pyproject.toml, over the package as it is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/package_tree.sh "$PWD/.venv/bin/lint-imports" --config "$PWD/pyproject.toml" --cache-dir "$PWD/.import_linter_cache"
