#!/usr/bin/env bash
# Runs a command where the package lies as it is installed: integrations/<framework> is horovod_oktopk.<framework>;
# with the benchmarks beside it, and what they use of the tests.
#
#   scripts/package_tree.sh COMMAND [ARGUMENT]...
#
# The tree is a copy; PROJECT in the environment of the command is the folder of the original.
set -euo pipefail
PROJECT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PROJECT
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp -r "$PROJECT/horovod_oktopk" "$PROJECT/benchmarks" "$tree/"
mkdir -p "$tree/tests" && cp -r "$PROJECT/tests/support" "$tree/tests/"
for framework in "$PROJECT"/integrations/*/; do cp -r "$framework" "$tree/horovod_oktopk/"; done
cd "$tree"
"$@"
