// Ascending indices: those that two vectors share, and the code in which they travel.
#pragma once

#include "blocks.hpp"

namespace {

// In windows of the index space, in which a bit for each index tells whether `other` has it.
int64_t find_common(const int64_t *mine, const int64_t *mine_end, const int64_t *other, const int64_t *other_end,
                    int64_t *positions) {
    constexpr uint64_t SPAN = uint64_t{1} << 17;
    std::vector<uint64_t> present(SPAN / 64);
    const int64_t *const first = mine;
    if (are_consecutive(other, other_end)) {
        mine = std::lower_bound(mine, mine_end, *other);
        mine_end = std::lower_bound(mine, mine_end, other_end[-1] + 1);
        for (int64_t i = 0; i < mine_end - mine; ++i) positions[i] = mine - first + i;
        return mine_end - mine;
    }
    int64_t count = 0;
    while (mine != mine_end && other != other_end) {
        const int64_t base = std::max(*mine, *other);
        mine = std::lower_bound(mine, mine_end, base);
        other = std::lower_bound(other, other_end, base);
        const auto offset = [base](const int64_t *index) { return static_cast<uint64_t>(*index - base); };
        std::fill(present.begin(), present.end(), 0);
        for (; other != other_end && offset(other) < SPAN; ++other)
            present[offset(other) / 64] |= uint64_t{1} << offset(other) % 64;
        for (; mine != mine_end && offset(mine) < SPAN; ++mine) {
            positions[count] = mine - first;
            count += present[offset(mine) / 64] >> offset(mine) % 64 & 1;
        }
    }
    return count;
}

Array<int64_t> common_positions(const Array<int64_t> &mine, const Array<int64_t> &other) {
    Array<int64_t> found(std::min(mine.size(), other.size()) + 1);
    int64_t *out = found.mutable_data(), count = 0;
    {
        py::gil_scoped_release released;
        count = find_common(mine.data(), mine.data() + mine.size(), other.data(), other.data() + other.size(), out);
    }
    found.resize({count}, false);
    return found;
}

// Elias-Fano: of each offset from start, the lower bits one after the other; the upper part of the i-th as a one at
// bit upper + i, or at bit upper if there are no lower bits. Both in words of 32 bits, the lowest bit first.
Array<uint32_t> pack_indices(const Array<int64_t> &indices, int64_t start, int low_bits, int64_t low_words,
                             int64_t upper_words) {
    const int64_t count = indices.size();
    if (low_bits < 0 || low_bits > 32 || 32 * low_words < count * low_bits || upper_words < 0)
        throw std::invalid_argument("0 to 32 low bits for each index, and words that hold them");
    Array<uint32_t> words(low_words + upper_words);
    uint32_t *low = words.mutable_data(), *upper = low + low_words;
    const int64_t *index = indices.data();
    const uint64_t mask = (uint64_t{1} << low_bits) - 1, limit = 32 * static_cast<uint64_t>(upper_words);
    bool fits = true;
    {
        py::gil_scoped_release released;
        std::memset(upper, 0, sizeof(uint32_t) * upper_words);
        uint64_t pending = 0;  // low bits that do not fill a word yet
        int filled = 0;
        for (int64_t i = 0; i < count; ++i) {
            const uint64_t offset = static_cast<uint64_t>(index[i] - start);
            const uint64_t at = (offset >> low_bits) + (low_bits ? i : 0);
            if (at >= limit) {
                fits = false;
                break;
            }
            upper[at / 32] |= uint32_t{1} << (at % 32);
            pending |= (offset & mask) << filled;
            filled += low_bits;
            if (filled >= 32) {
                *low++ = static_cast<uint32_t>(pending);
                pending >>= 32;
                filled -= 32;
            }
        }
        if (filled) *low = static_cast<uint32_t>(pending);
    }
    if (!fits) throw std::invalid_argument("an index lies outside of what the words can hold");
    return words;
}

// The indices, ascending within [start, stop); fewer than count where the words hold none such.
Array<int64_t> unpack_indices(const Array<uint32_t> &words, int64_t count, int64_t start, int64_t stop, int low_bits,
                              int64_t low_words) {
    const int64_t upper_words = words.size() - low_words;
    if (low_bits < 0 || low_bits > 32 || count < 0 || 32 * low_words < count * low_bits || upper_words < 0)
        throw std::invalid_argument("0 to 32 low bits for each index, and words that hold them");
    Array<int64_t> indices(count);
    int64_t *out = indices.mutable_data(), found = 0;
    const uint32_t none[2] = {}, *low = low_bits ? words.data() : none, *upper = words.data() + low_words;
    const uint64_t mask = (uint64_t{1} << low_bits) - 1, span = static_cast<uint64_t>(stop - start);
    bool valid = true;
    {
        py::gil_scoped_release released;
        int64_t ones = 0;
        for (int64_t word = 0; word < upper_words; ++word) ones += __builtin_popcount(upper[word]);
        if (ones == count) {
            uint64_t least = 0, bit = 0;  // what the next offset must be at least, and where its lower bits begin
            for (int64_t word = 0; word < upper_words; word += 2) {
                uint64_t bits = upper[word] | (word + 1 < upper_words ? static_cast<uint64_t>(upper[word + 1]) << 32 : 0);
                for (uint64_t high = 32 * word - (low_bits ? found : 0); bits;
                     bits &= bits - 1, bit += low_bits, high -= low_bits > 0) {
                    // The word after the last lower bits is an upper one.
                    const uint64_t pair = low[bit / 32] | static_cast<uint64_t>(low[bit / 32 + 1]) << 32;
                    const uint64_t offset = (high + __builtin_ctzll(bits)) << low_bits | (pair >> bit % 32 & mask);
                    valid &= offset >= least;
                    least = offset + 1;
                    out[found++] = start + static_cast<int64_t>(offset);
                }
            }
            valid &= least <= span;
        }
    }
    if (!valid || found != count) indices.resize({0}, false);
    return indices;
}

}  // namespace
