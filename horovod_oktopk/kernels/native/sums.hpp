// Sums of sparse parts.
#pragma once

#include "blocks.hpp"

namespace {

// The elements of one part that are still to be summed.
template <class T> struct Cursor {
    const int64_t *index, *end;
    const T *value;
};

// Sets the bits from first to stop.
inline void set_bits(uint64_t *words, int64_t first, int64_t stop) {
    for (; first < stop && first % 64; ++first) words[first / 64] |= uint64_t{1} << first % 64;
    for (; first + 64 <= stop; first += 64) words[first / 64] = ~uint64_t{0};
    for (; first < stop; ++first) words[first / 64] |= uint64_t{1} << first % 64;
}

// Adds a part's elements of one window, which begins at base.
template <class T> void add_window(Cursor<T> &part, int64_t base, T *sums, uint64_t *present) {
    if (part.index == part.end || *part.index - base >= WINDOW) return;
    if (are_consecutive(part.index, part.end)) {
        const int64_t first = *part.index - base, count = std::min<int64_t>(part.end - part.index, WINDOW - first);
        for (int64_t i = 0; i < count; ++i) sums[first + i] += part.value[i];
        set_bits(present, first, first + count);
        part.index += count;
        part.value += count;
        return;
    }
    for (; part.index != part.end; ++part.index, ++part.value) {
        const uint64_t at = static_cast<uint64_t>(*part.index) - static_cast<uint64_t>(base);
        if (at >= static_cast<uint64_t>(WINDOW)) return;
        sums[at] += *part.value;
        present[at / 64] |= uint64_t{1} << at % 64;
    }
}

// Writes the elements of 64 that are present, and sets them to zero; returns how many there are.
template <class T> int64_t take_word(uint64_t bits, int64_t base, T *sums, int64_t *indices, T *values) {
    if (bits == ~uint64_t{0}) {
        for (int64_t i = 0; i < 64; ++i) indices[i] = base + i;
        std::copy(sums, sums + 64, values);
        std::fill(sums, sums + 64, T(0));
        return 64;
    }
    int64_t count = 0;
    for (; bits; bits &= bits - 1) {
        const int64_t at = __builtin_ctzll(bits);
        indices[count] = base + at;
        values[count++] = std::exchange(sums[at], T(0));
    }
    return count;
}

// Sums ascending parts in their order; returns how many elements the sum has. Windows of the index space are
// summed densely, and a bit for each index tells which are there.
template <class T> int64_t sum_windows(std::vector<Cursor<T>> &cursors, int64_t *indices, T *values) {
    std::vector<T> sums(WINDOW);
    std::vector<uint64_t> present(WINDOW / 64);
    int64_t count = 0;
    for (;;) {
        int64_t base = std::numeric_limits<int64_t>::max();
        for (const auto &part : cursors)
            if (part.index != part.end) base = std::min(base, *part.index);
        if (base == std::numeric_limits<int64_t>::max()) return count;
        for (auto &part : cursors) add_window(part, base, sums.data(), present.data());
        for (int64_t word = 0; word < WINDOW / 64; ++word) {
            const uint64_t bits = std::exchange(present[word], 0);
            count += take_word(bits, base + 64 * word, &sums[64 * word], indices + count, values + count);
        }
    }
}

template <class T>
std::pair<Array<int64_t>, Array<T>> sum_parts(const std::vector<Array<int64_t>> &indices,
                                              const std::vector<Array<T>> &values) {
    if (indices.size() != values.size()) throw std::invalid_argument("as many index parts as value parts");
    std::vector<Cursor<T>> cursors;
    int64_t total = 0;
    for (size_t part = 0; part < indices.size(); ++part) {
        if (indices[part].size() != values[part].size())
            throw std::invalid_argument("a part must have as many indices as values");
        cursors.push_back({indices[part].data(), indices[part].data() + indices[part].size(), values[part].data()});
        total += indices[part].size();
    }
    Array<int64_t> out_indices(total);
    Array<T> out_values(total);
    int64_t *index = out_indices.mutable_data();
    T *value = out_values.mutable_data();
    int64_t count;
    {
        py::gil_scoped_release released;
        count = sum_windows(cursors, index, value);
    }
    out_indices.resize({count}, false);
    out_values.resize({count}, false);
    return {out_indices, out_values};
}

}  // namespace
