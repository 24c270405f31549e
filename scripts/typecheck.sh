#!/usr/bin/env bash
# mypy over the package, and over the benchmarks, which use its insides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.venv/bin/mypy -p horovod_oktopk -p benchmarks
