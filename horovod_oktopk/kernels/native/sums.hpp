// Sums of sparse parts.
#pragma once

#include "common.hpp"

namespace {

// The elements of one part that are still to be summed.
template <class T> struct Cursor {
    const int64_t *index, *end;
    const T *value;
};

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
        for (auto &part : cursors)
            for (; part.index != part.end; ++part.index, ++part.value) {
                const uint64_t at = static_cast<uint64_t>(*part.index) - static_cast<uint64_t>(base);
                if (at >= static_cast<uint64_t>(WINDOW)) break;
                sums[at] += *part.value;
                present[at / 64] |= uint64_t{1} << at % 64;
            }
        for (int64_t word = 0; word < WINDOW / 64; ++word) {
            for (uint64_t bits = present[word]; bits; bits &= bits - 1) {
                const int64_t at = 64 * word + __builtin_ctzll(bits);
                indices[count] = base + at;
                values[count++] = std::exchange(sums[at], T(0));
            }
            present[word] = 0;
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
