// Values in 4 bits: a sign, and which of eight levels is nearest. Eight to a word, the first in the lowest bits.
#pragma once

#include <cmath>

#include "blocks.hpp"
#include "half_precision.hpp"

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

// Write the words of at most a window of values.
template <class T> void pack_levels(const T *value, int64_t count, const T *limit, uint32_t *word) {
    uint32_t codes[WINDOW];
    find_levels(value, count, limit, codes);
    std::fill(codes + count, codes + (count + CODES - 1) / CODES * CODES, 0);
    for (int64_t i = 0; i < count; i += CODES) {
        uint32_t packed = 0;
        for (int j = 0; j < CODES; ++j) packed |= codes[i + j] << 4 * j;
        word[i / CODES] = packed;
    }
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
    for (int64_t start = 0; start < count; start += WINDOW)
        pack_levels(value + start, std::min(WINDOW, count - start), limit, word + start / CODES);
    return words;
}

inline void check_block(int64_t block) {
    if (block < CODES || WINDOW % block) throw std::invalid_argument("a block must have 8 to 8192 values, a power of 2");
}

// Write the values of a block as fractions of the largest magnitude; return that, in bfloat16.
template <class T> INLINE uint16_t divide(const T *value, int64_t count, T *fraction) {
    typename Integer<T>::type most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, magnitude(value[i]));
    T largest;
    std::memcpy(&largest, &most, sizeof largest);
    if (!(largest <= std::numeric_limits<T>::max())) {
        std::fill(fraction, fraction + count, T{1});
        return BFLOAT16_INFINITY;
    }
    const T divisor = largest == 0 ? 1 : largest;
    for (int64_t i = 0; i < count; ++i) fraction[i] = value[i] / divisor;
    return to_bfloat16(static_cast<float>(std::min<T>(largest, std::numeric_limits<float>::max())));
}
FOR_EACH_PROCESSOR uint16_t fractions_of(const float *value, int64_t count, float *fraction) {
    return divide(value, count, fraction);
}
FOR_EACH_PROCESSOR uint16_t fractions_of(const double *value, int64_t count, double *fraction) {
    return divide(value, count, fraction);
}

template <class T> py::tuple to_blocks(const Array<T> &values, const Array<float> &levels, int64_t block) {
    check_levels(levels);
    check_block(block);
    const int64_t count = values.size();
    const T *value = values.data();
    const float *level = levels.data();
    Array<uint32_t> words((count + CODES - 1) / CODES);
    Array<uint16_t> scales((count + block - 1) / block);
    uint32_t *word = words.mutable_data();
    uint16_t *scale = scales.mutable_data();
    {
        py::gil_scoped_release released;
        T limit[LEVELS - 1], fractions[WINDOW];
        find_limits(level, limit);
        for (int64_t start = 0; start < count; start += WINDOW) {
            const int64_t length = std::min(WINDOW, count - start);
            for (int64_t i = 0; i < length; i += block)
                *scale++ = fractions_of(value + start + i, std::min(block, length - i), fractions + i);
            pack_levels(fractions, length, limit, word + start / CODES);
        }
    }
    return py::make_tuple(words, scales);
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

template <class T> Array<T> multiplied(const Array<uint32_t> &words, const Array<uint16_t> &scales, int64_t count,
                                       const Array<float> &levels, int64_t block) {
    check_block(block);
    if (scales.size() * block < count) throw std::invalid_argument("fewer scales than the values have blocks");
    Array<T> values = looked_up<T>(words, count, levels);
    const uint16_t *scale = scales.data();
    T *value = values.mutable_data();
    py::gil_scoped_release released;
    for (int64_t start = 0; start < count; start += block) {
        const T factor = from_bfloat16(scale[start / block]);
        for (int64_t i = start; i < std::min(start + block, count); ++i) value[i] *= factor;
    }
    return values;
}

inline py::array from_blocks(const Array<uint32_t> &words, const Array<uint16_t> &scales, int64_t count,
                             const Array<float> &levels, int64_t block, const py::object &dtype) {
    if (is_single(dtype)) return multiplied<float>(words, scales, count, levels, block);
    return multiplied<double>(words, scales, count, levels, block);
}

inline py::array from_levels(const Array<uint32_t> &words, int64_t count, const Array<float> &levels,
                             const py::object &dtype) {
    if (is_single(dtype)) return looked_up<float>(words, count, levels);
    return looked_up<double>(words, count, levels);
}

}  // namespace
