#!/usr/bin/env bash
# The contracts of imports in pyproject.toml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.venv/bin/lint-imports
