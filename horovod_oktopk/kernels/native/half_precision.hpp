// Values in 16 bits, as in half_precision.py.
#pragma once

#include <cmath>

#include "common.hpp"

namespace {

// The nearest numbers of 16 bits as their bits, ties to even, and never infinity; see half_precision.py.
INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>((nearest & 0x7fff) == 0x7f80 ? bits >> 16 : nearest);
}
INLINE uint16_t to_float16(float value) {
    const uint32_t bits = magnitude(value), sign = std::signbit(value) ? 0x8000 : 0;
    const float lifted = std::fabs(value) + 0.5F;  // whose last bit is float16's smallest number
    const uint32_t small = magnitude(lifted) - magnitude(0.5F);
    const uint32_t large = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    const uint32_t half = bits < 0x38800000 ? small : large;
    return static_cast<uint16_t>(sign | (bits < 0x38800000 || large < 0x7c00 ? half : 0x7800));
}
INLINE float from_bfloat16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
INLINE float from_float16(uint16_t half) {
    const uint32_t mine = half & 0x7fff, sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const float small = static_cast<float>(static_cast<int32_t>(mine)) * 0x1p-24F;
    uint32_t bits = magnitude(small);
    if (mine >= 0x400) bits = (mine << 13) + (mine < 0x7c00 ? 0x38000000 : 0x70000000);
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

FOR_EACH_PROCESSOR void round_all(const float *value, int64_t count, bool brain, uint16_t *half) {
    if (brain) {
        for (int64_t i = 0; i < count; ++i) half[i] = to_bfloat16(value[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) half[i] = to_float16(value[i]);
    }
}
FOR_EACH_PROCESSOR void widen_all(const uint16_t *half, int64_t count, bool brain, float *value) {
    if (brain) {
        for (int64_t i = 0; i < count; ++i) value[i] = from_bfloat16(half[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) value[i] = from_float16(half[i]);
    }
}

// name: "bfloat16", and otherwise float16.
template <class T> Array<uint16_t> to_half(const Array<T> &values, const std::string &name) {
    constexpr T LIMIT = std::numeric_limits<float>::max();
    const int64_t count = values.size();
    const bool brain = name == "bfloat16";
    const T *value = values.data();
    Array<uint16_t> halves(count);
    uint16_t *half = halves.mutable_data();
    py::gil_scoped_release released;
    float singles[WINDOW];
    for (int64_t start = 0; start < count; start += WINDOW) {
        const int64_t length = std::min(WINDOW, count - start);
        for (int64_t i = 0; i < length; ++i)
            singles[i] = static_cast<float>(std::min(std::max(value[start + i], -LIMIT), LIMIT));
        round_all(singles, length, brain, half + start);
    }
    return halves;
}
template <class T> Array<T> widened(const Array<uint16_t> &halves, bool brain) {
    const int64_t count = halves.size();
    const uint16_t *half = halves.data();
    Array<T> values(count);
    T *value = values.mutable_data();
    py::gil_scoped_release released;
    float singles[WINDOW];
    for (int64_t start = 0; start < count; start += WINDOW) {
        const int64_t length = std::min(WINDOW, count - start);
        widen_all(half + start, length, brain, singles);
        std::copy(singles, singles + length, value + start);
    }
    return values;
}

inline py::array from_half(const Array<uint16_t> &bits, const std::string &name, const py::object &dtype) {
    const bool brain = name == "bfloat16";
    if (is_single(dtype)) return widened<float>(bits, brain);
    return widened<double>(bits, brain);
}

}  // namespace
