// Selecting of few elements: those that pass, and the k-th magnitude.
#pragma once

#include <functional>

#include "blocks.hpp"

namespace {

template <class T>
std::pair<Array<int64_t>, Array<T>> passing(const Array<int64_t> &indices, const Array<T> &values, T threshold) {
    using Int = typename Integer<T>::type;
    const Int bound = threshold > 0 ? magnitude(threshold) : 1;
    const Int infinity = magnitude(std::numeric_limits<T>::infinity());
    const int64_t size = values.size(), *index = indices.data();
    const T *value = values.data();
    if (indices.size() != size) throw std::invalid_argument("as many indices as values");
    Array<int64_t> out_indices(size + SLACK);
    Array<T> out_values(size + SLACK);
    int64_t *to_index = out_indices.mutable_data(), count = 0;
    T *to_value = out_values.mutable_data();
    {
        py::gil_scoped_release released;
        for (int64_t i = 0; i < size; ++i) {  // no branches: they could not be predicted
            const Int mine = magnitude(value[i]);
            to_index[count] = index[i];
            to_value[count] = value[i];
            count += (mine >= bound) & (mine <= infinity);
        }
    }
    out_indices.resize({count}, false);
    out_values.resize({count}, false);
    return {out_indices, out_values};
}

constexpr int64_t SAMPLE = 512, MARGIN = 40;  // of ranks: 3.5 standard deviations of one in a sample, or more
constexpr int TURNS = 8;                      // of which few are needed where magnitudes differ

// Two magnitudes between which the k-th largest most likely lies: those around its place in a sample.
template <class Int> std::pair<Int, Int> likely_bounds(const Int *magnitudes, int64_t count, int64_t k) {
    Int sample[SAMPLE];
    for (int64_t i = 0; i < SAMPLE; ++i) sample[i] = magnitudes[i * count / SAMPLE];
    std::sort(sample, sample + SAMPLE, std::greater<Int>());
    const int64_t rank = k * SAMPLE / count;
    return {rank + MARGIN < SAMPLE ? sample[rank + MARGIN] : 0,
            rank >= MARGIN ? sample[rank - MARGIN] : std::numeric_limits<Int>::max()};
}

// Keeps what lies in [least, most]; (how many, how many lie above).
template <class Int>
INLINE std::pair<int64_t, int64_t> keep_between(const Int *numbers, int64_t count, Int least, Int most, Int *kept) {
    int64_t within = 0, above = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t length = std::min(BLOCK, count - start);
        uint32_t here = 0, larger = 0;
        for (int64_t i = 0; i < length; ++i) {
            const Int number = numbers[start + i];
            here |= static_cast<uint32_t>((number >= least) & (number <= most)) << i;
            larger += number > most;
        }
        above += larger;
        for (; here; here &= here - 1) kept[within++] = numbers[start + __builtin_ctz(here)];
    }
    return {within, above};
}
FOR_EACH_PROCESSOR std::pair<int64_t, int64_t> between(const int32_t *numbers, int64_t count, int32_t least,
                                                       int32_t most, int32_t *kept) {
    return keep_between(numbers, count, least, most, kept);
}
FOR_EACH_PROCESSOR std::pair<int64_t, int64_t> between(const int64_t *numbers, int64_t count, int64_t least,
                                                       int64_t most, int64_t *kept) {
    return keep_between(numbers, count, least, most, kept);
}

// Of the values the k-th largest magnitude, k from 1: what lies between likely bounds is searched on (Floyd and
// Rivest, 1975), and where it does not lie there, all.
template <class T> T kth_magnitude(const Array<T> &values, int64_t k) {
    using Int = typename Integer<T>::type;
    int64_t count = values.size();
    if (k < 1 || k > count) throw std::invalid_argument("k from 1 to the length");
    const T *value = values.data();
    Array<Int> first(count), second(count);
    Int *left = first.mutable_data(), *kept = second.mutable_data();
    py::gil_scoped_release released;
    for (int64_t i = 0; i < count; ++i) left[i] = magnitude(value[i]);
    for (int turn = 0; turn < TURNS && count > 4 * SAMPLE; ++turn) {
        const auto [least, most] = likely_bounds(left, count, k);
        const auto [within, above] = between(left, count, least, most, kept);
        if (k <= above || k > above + within) break;
        k -= above;
        count = within;
        std::swap(left, kept);
    }
    std::nth_element(left, left + k - 1, left + count, std::greater<Int>());
    T result;
    std::memcpy(&result, &left[k - 1], sizeof result);
    return result;
}

}  // namespace
