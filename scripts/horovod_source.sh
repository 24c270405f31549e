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

# PyTorch is imported once, not seven times: each import takes 4 seconds of processor time, before anything is compiled.
# A CUDA toolkit without headers, as nvcc alone, is none: CMake would not find it, and nothing would be compiled.
cat >cmake/Modules/pytorch.py <<'PYTHON'
import contextlib, io, pathlib
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    import torch
    from torch.utils import cpp_extension
    cuda = (torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
            and pathlib.Path(cpp_extension.CUDA_HOME, 'include', 'cuda_runtime.h').exists())
    rocm = torch.version.hip is not None and cpp_extension.ROCM_HOME is not None
    extension = (cpp_extension.CUDAExtension if cuda or rocm else cpp_extension.CppExtension)('', [])
for name, value in {
    'Pytorch_VERSION': torch.__version__, 'Pytorch_CXX11': torch.compiled_with_cxx11_abi(),
    'Pytorch_CUDA': cuda, 'Pytorch_ROCM': rocm,
    'Pytorch_INCLUDE_DIRS': ';'.join(extension.include_dirs),
    'Pytorch_LIBRARY_DIRS': ';'.join(extension.library_dirs), '_Pytorch_LIBRARIES': ';'.join(extension.libraries),
}.items():
    print(f'set({name} "{value}")')
PYTHON
sed -i -e '/^execute_process/,/OUTPUT_STRIP_TRAILING_WHITESPACE)/d' \
    -e '/^include(FindPackageHandle/i execute_process(COMMAND ${PY_EXE} ${CMAKE_CURRENT_LIST_DIR}/pytorch.py OUTPUT_VARIABLE _Pytorch_FOUND)' \
    -e '/^include(FindPackageHandle/i cmake_language(EVAL CODE "${_Pytorch_FOUND}")' cmake/Modules/FindPytorch.cmake

# Files that include the same headers are compiled together, in 190 seconds of processor time rather than 425. Those of
# a framework stay apart from Horovod's, as both define LOG; allreduce.cc of Gloo stays alone, as it has a name that
# another file uses differently. For TensorFlow Horovod compiles a copy of Gloo, and does not need this one. What tunes
# Horovod by Gaussian processes takes long to optimize, and runs now and then.
together() {  # FOLDER SOURCES TARGET, as Horovod's CMake files name them
    cat >>"horovod/$1/CMakeLists.txt" <<CMAKE
set_source_files_properties(\${SOURCES} PROPERTIES UNITY_GROUP common)
set_source_files_properties(\${$2} PROPERTIES UNITY_GROUP $1)
set_source_files_properties(\${PROJECT_SOURCE_DIR}/horovod/common/optim/gaussian_process.cc
                            PROPERTIES UNITY_GROUP "" COMPILE_OPTIONS -O1)
set_target_properties(\${$3} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
CMAKE
}
together torch PYTORCH_SOURCES PYTORCH_TARGET_LIB
together tensorflow TF_SOURCES TF_TARGET_LIB
cat >>third_party/gloo/gloo/CMakeLists.txt <<'CMAKE'
set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/allreduce.cc" PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
set_target_properties(gloo PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16 EXCLUDE_FROM_ALL ON)
CMAKE
