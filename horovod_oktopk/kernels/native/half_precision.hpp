// bfloat16, as in numpy_kernels.py.
#pragma once

#include "blocks.hpp"

namespace {

constexpr uint16_t BFLOAT16_INFINITY = 0x7f80;

// The nearest bfloat16 as its bits, ties to even, and never infinity; see numpy_kernels.py.
INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<uint16_t>((nearest & 0x7fff) == BFLOAT16_INFINITY ? bits >> 16 : nearest);
}
inline float from_bfloat16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

FOR_EACH_PROCESSOR void round_all(const float *value, int64_t count, uint16_t *half) {
    for (int64_t i = 0; i < count; ++i) half[i] = to_bfloat16(value[i]);
}

template <class T> Array<uint16_t> to_half(const Array<T> &values) {
    constexpr T LIMIT = std::numeric_limits<float>::max();
    const int64_t count = values.size();
    const T *value = values.data();
    Array<uint16_t> halves(count);
    uint16_t *half = halves.mutable_data();
    py::gil_scoped_release released;
    float singles[WINDOW];
    for (int64_t start = 0; start < count; start += WINDOW) {
        const int64_t length = std::min(WINDOW, count - start);
        for (int64_t i = 0; i < length; ++i)
            singles[i] = static_cast<float>(std::min(std::max(value[start + i], -LIMIT), LIMIT));
        round_all(singles, length, half + start);
    }
    return halves;
}
template <class T> Array<T> widened(const Array<uint16_t> &halves) {
    Array<T> values(halves.size());
    const uint16_t *half = halves.data();
    T *value = values.mutable_data();
    py::gil_scoped_release released;
    std::transform(half, half + halves.size(), value, from_bfloat16);
    return values;
}

inline py::array from_half(const Array<uint16_t> &bits, const py::object &dtype) {
    if (is_single(dtype)) return widened<float>(bits);
    return widened<double>(bits);
}

}  // namespace
