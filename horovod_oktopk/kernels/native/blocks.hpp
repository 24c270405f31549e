// What all kernels share. Each header is included once, by bindings.cpp: one translation unit, so that all is inlined.
//
// Magnitudes are compared as integers: without its sign bit, a float's bits order as its magnitude does,
// infinity is the largest number, and NaN lies above it. So one maximum of a block tells whether anything
// in it passes, and whether all of it is finite. Blocks are plain loops that the compiler vectorises, once
// for each instruction set (target_clones); the processor's own version is chosen when the module is loaded.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace py = pybind11;

#if defined(__x86_64__) && defined(__GNUC__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#define WITH_AVX512 __attribute__((target("avx512f")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace {

constexpr int64_t BLOCK = 32;                 // elements that are looked at one by one only if one of them passes
static_assert(BLOCK <= 32, "a block's passing elements are bits of 32");
constexpr int64_t SLACK = 2 * BLOCK;          // that a full room has left: for one block, written in whole registers
constexpr int64_t WINDOW = int64_t{1} << 13;  // elements that are handled at a time, in the cache

template <class T> struct Integer;
template <> struct Integer<float> { using type = int32_t; };
template <> struct Integer<double> { using type = int64_t; };

template <class T> INLINE typename Integer<T>::type magnitude(T value) {
    typename Integer<T>::type bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits & std::numeric_limits<typename Integer<T>::type>::max();
}

// Whether ascending indices leave none out.
inline bool are_consecutive(const int64_t *index, const int64_t *end) {
    return index != end && static_cast<uint64_t>(end[-1]) - static_cast<uint64_t>(*index) ==
                               static_cast<uint64_t>(end - index - 1);
}

template <class T> using Array = py::array_t<T, py::array::c_style>;

// float32, and otherwise float64.
inline bool is_single(const py::object &dtype) { return py::dtype::from_args(dtype).itemsize() == sizeof(float); }

#ifdef WITH_AVX512
bool avx512 = __builtin_cpu_supports("avx512f");
constexpr int64_t LANES = 64 / sizeof(float);  // of a register, and of a line
static_assert(LANES <= SLACK, "a register's elements are written at once");
#endif

}  // namespace
