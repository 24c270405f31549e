// Values in 4 bits: a sign, and which of eight levels is nearest. Eight to a word, the first in the lowest bits.
#pragma once

#include <cmath>

#include "blocks.hpp"

namespace {

constexpr int LEVELS = 8, SIGN = 8, CODES = 8;  // magnitudes; a code's bit of the sign; codes in a word

inline void check_levels(const Array<float> &levels) {
    if (levels.size() != LEVELS) throw std::invalid_argument("there must be eight levels");
}

// The least numbers of T that are as near to the next level as to this one, or nearer: ties go to the larger level.
template <class T> void find_limits(const float *level, T *limit) {
    for (int j = 0; j < LEVELS - 1; ++j) {
        const double middle = (static_cast<double>(level[j]) + level[j + 1]) / 2;
        limit[j] = static_cast<T>(middle);
        if (limit[j] < middle) limit[j] = std::nextafter(limit[j], std::numeric_limits<T>::infinity());
    }
}

template <class T> INLINE void nearest_levels(const T *value, int64_t count, const T *limit, uint32_t *code) {
    for (int64_t i = 0; i < count; ++i) {
        const T size = std::fabs(value[i]);
        uint32_t level = 0;
        for (int j = 0; j < LEVELS - 1; ++j) level += !(size < limit[j]);
        code[i] = level + (std::signbit(value[i]) ? SIGN : 0);
    }
}
FOR_EACH_PROCESSOR void find_levels(const float *value, int64_t count, const float *limit, uint32_t *code) {
    nearest_levels(value, count, limit, code);
}
FOR_EACH_PROCESSOR void find_levels(const double *value, int64_t count, const double *limit, uint32_t *code) {
    nearest_levels(value, count, limit, code);
}

template <class T> Array<uint32_t> to_levels(const Array<T> &values, const Array<float> &levels) {
    check_levels(levels);
    const int64_t count = values.size();
    const T *value = values.data();
    const float *level = levels.data();
    Array<uint32_t> words((count + CODES - 1) / CODES);
    uint32_t *word = words.mutable_data();
    py::gil_scoped_release released;
    T limit[LEVELS - 1];
    find_limits(level, limit);
    uint32_t codes[WINDOW];
    for (int64_t start = 0; start < count; start += WINDOW) {
        const int64_t length = std::min(WINDOW, count - start);
        find_levels(value + start, length, limit, codes);
        std::fill(codes + length, codes + (length + CODES - 1) / CODES * CODES, 0);
        for (int64_t i = 0; i < length; i += CODES) {
            uint32_t packed = 0;
            for (int j = 0; j < CODES; ++j) packed |= codes[i + j] << 4 * j;
            word[(start + i) / CODES] = packed;
        }
    }
    return words;
}

template <class T> Array<T> looked_up(const Array<uint32_t> &words, int64_t count, const Array<float> &levels) {
    check_levels(levels);
    if (count < 0 || words.size() * CODES < count) throw std::invalid_argument("fewer words than the values take");
    const uint32_t *word = words.data();
    const float *level = levels.data();
    Array<T> values(count);
    T *value = values.mutable_data();
    py::gil_scoped_release released;
    T pairs[256][2];  // by the byte that holds both codes
    for (int byte = 0; byte < 256; ++byte)
        for (int j = 0; j < 2; ++j) {
            const int code = byte >> 4 * j & 15;
            pairs[byte][j] = code < SIGN ? level[code] : -level[code - SIGN];
        }
    for (int64_t i = 0; i + 1 < count; i += 2)
        std::memcpy(value + i, pairs[word[i / CODES] >> 4 * (i % CODES) & 255], sizeof pairs[0]);
    if (count % 2) value[count - 1] = pairs[word[(count - 1) / CODES] >> 4 * ((count - 1) % CODES) & 15][0];
    return values;
}

inline py::array from_levels(const Array<uint32_t> &words, int64_t count, const Array<float> &levels,
                             const py::object &dtype) {
    if (is_single(dtype)) return looked_up<float>(words, count, levels);
    return looked_up<double>(words, count, levels);
}

}  // namespace
