// Values in 4 bits: a sign, and which of eight levels is nearest. Eight to a word, the first in the lowest bits.
#pragma once

#include <cmath>

#include "common.hpp"

namespace {

constexpr int LEVELS = 8, SIGN = 8, CODES = 8;  // magnitudes; a code's bit of the sign; codes in a word

inline void check_levels(const Array<float> &levels) {
    if (levels.size() != LEVELS) throw std::invalid_argument("there must be eight levels");
}

// A tie goes to the larger level.
template <class T> INLINE void nearest_levels(const T *value, int64_t count, const double *middle, uint32_t *code) {
    for (int64_t i = 0; i < count; ++i) {
        const double size = std::fabs(static_cast<double>(value[i]));
        uint32_t level = 0;
        for (int j = 0; j < LEVELS - 1; ++j) level += !(size < middle[j]);
        code[i] = level + (std::signbit(value[i]) ? SIGN : 0);
    }
}
FOR_EACH_PROCESSOR void find_levels(const float *value, int64_t count, const double *middle, uint32_t *code) {
    nearest_levels(value, count, middle, code);
}
FOR_EACH_PROCESSOR void find_levels(const double *value, int64_t count, const double *middle, uint32_t *code) {
    nearest_levels(value, count, middle, code);
}

template <class T> Array<uint32_t> to_levels(const Array<T> &values, const Array<float> &levels) {
    check_levels(levels);
    const int64_t count = values.size();
    const T *value = values.data();
    const float *level = levels.data();
    Array<uint32_t> words((count + CODES - 1) / CODES);
    uint32_t *word = words.mutable_data();
    py::gil_scoped_release released;
    double middle[LEVELS - 1];
    for (int j = 0; j < LEVELS - 1; ++j) middle[j] = (static_cast<double>(level[j]) + level[j + 1]) / 2;
    uint32_t codes[WINDOW];
    for (int64_t start = 0; start < count; start += WINDOW) {
        const int64_t length = std::min(WINDOW, count - start);
        find_levels(value + start, length, middle, codes);
        std::fill(codes + length, codes + (length + CODES - 1) / CODES * CODES, 0);
        for (int64_t i = 0; i < length; i += CODES) {
            uint32_t packed = 0;
            for (int j = 0; j < CODES; ++j) packed |= codes[i + j] << 4 * j;
            word[(start + i) / CODES] = packed;
        }
    }
    return words;
}

template <class T> Array<T> from_levels(const Array<uint32_t> &words, int64_t count, const Array<float> &levels) {
    check_levels(levels);
    if (count < 0 || words.size() * CODES < count) throw std::invalid_argument("fewer words than the values take");
    const uint32_t *word = words.data();
    const float *level = levels.data();
    Array<T> values(count);
    T *value = values.mutable_data();
    py::gil_scoped_release released;
    T numbers[2 * LEVELS];
    for (int j = 0; j < LEVELS; ++j) {
        numbers[j] = level[j];
        numbers[j + SIGN] = -level[j];
    }
    for (int64_t i = 0; i < count; ++i) value[i] = numbers[word[i / CODES] >> 4 * (i % CODES) & 15];
    return values;
}

}  // namespace
