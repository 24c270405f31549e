#!/usr/bin/env bash
# Writes the source of Horovod 0.28.1 into a folder, changed so that it compiles with today's frameworks:
#
#   scripts/horovod_source.sh FOLDER    # pip and setuptools come from PATH
set -euo pipefail

FOLDER=$1
mkdir -p "$FOLDER"
pip download --no-deps --no-build-isolation --no-binary horovod --dest "$FOLDER" horovod==0.28.1
tar -xzf "$FOLDER/horovod-0.28.1.tar.gz" -C "$FOLDER" --strip-components 1
cd "$FOLDER"

# The headers of PyTorch and TensorFlow need C++17.
sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' CMakeLists.txt horovod/torch/CMakeLists.txt
# Horovod's operations for XLA exist on GPUs only. Elsewhere this file only includes headers, which TensorFlow 2.19 moved.
sed -i 's/^#if TENSORFLOW_VERSION/#if HAVE_GPU \&\& TENSORFLOW_VERSION/' horovod/tensorflow/xla_mpi_ops.cc
# No debug information, which is most of the size of the libraries.
sed -i 's/"-O2" "-O3" CMAKE_CXX_FLAGS/"-O2 -g" "-O3" CMAKE_CXX_FLAGS/' CMakeLists.txt
