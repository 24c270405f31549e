// The kernels of kernels.py in C++: the same results as NumPy's, bit for bit, in one pass over memory.
//
// Magnitudes are compared as integers: without its sign bit, a float's bits order as its magnitude does,
// infinity is the largest number, and NaN lies above it. So one maximum of a block tells whether anything
// in it passes, and whether all of it is finite. Blocks are plain loops that the compiler vectorises, once
// for each instruction set (target_clones); the processor's own version is chosen when the module is loaded.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
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

template <class T> struct CandidateBuffer {  // room for capacity + SLACK elements; full once count > capacity
    int64_t *indices;
    T *values;
    int64_t count, capacity;
};

// Writes past the cache, which a large vector would only wash out: a third less traffic than through it.
template <class T> INLINE void store(const T *block, T *out, int64_t length, bool stream) {
#if defined(__SSE2__)
    if (stream && length == BLOCK && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
        for (size_t i = 0; i < BLOCK * sizeof(T) / 16; ++i)
            _mm_stream_si128(reinterpret_cast<__m128i *>(out) + i, reinterpret_cast<const __m128i *>(block)[i]);
        return;
    }
#endif
    for (int64_t i = 0; i < length; ++i) out[i] = block[i];
}

// What is read and written: out = scale * residual + gradient, or, where nothing is added, out alone.
template <class T> struct Terms {
    const T *residual;
    T *gradient, *out;
    T scale;
    bool stream, clear;  // past the cache; the gradient is zero afterwards, which costs nothing while it is in the cache

    INLINE Terms from(int64_t start) const {
        return {residual + start, gradient + start, out + start, scale, stream, clear};
    }
};

// One block; returns its largest magnitude.
template <bool ADD, class T>
INLINE auto block(const Terms<T> &terms, int64_t length, typename Integer<T>::type bound, int64_t first,
                  CandidateBuffer<T> &buffer) {
    using Int = typename Integer<T>::type;
    alignas(64) T values[BLOCK];
    Int largest = 0;
    for (int64_t i = 0; i < length; ++i) {
        values[i] = ADD ? terms.scale * terms.residual[i] + terms.gradient[i] : terms.out[i];
        largest = std::max(largest, magnitude(values[i]));
    }
    if (ADD) store(values, terms.out, length, terms.stream);
    if (ADD && terms.clear) std::memset(terms.gradient, 0, sizeof(T) * length);
    if (largest >= bound && buffer.count <= buffer.capacity) {
        const Int infinity = magnitude(std::numeric_limits<T>::infinity());
        uint32_t passes = 0;
        for (int64_t i = 0; i < length; ++i) {
            const Int mine = magnitude(values[i]);
            passes |= static_cast<uint32_t>((mine >= bound) & (mine <= infinity)) << i;
        }
        for (; passes; passes &= passes - 1) {
            const int i = __builtin_ctz(passes);
            buffer.indices[buffer.count] = first + i;
            buffer.values[buffer.count++] = values[i];
        }
    }
    return largest;
}

template <bool ADD, class T>
INLINE bool pass(const Terms<T> &terms, int64_t length, T threshold, int64_t first, CandidateBuffer<T> &buffer) {
    using Int = typename Integer<T>::type;
    const Int bound = threshold > 0 ? magnitude(threshold) : 1;  // 1: the least number that is not zero
    Int largest = 0;
    int64_t start = 0;
    const auto next = [&](int64_t count) INLINE_LAMBDA {
        largest = std::max(largest, block<ADD, T>(terms.from(start), count, bound, first + start, buffer));
        start += count;
    };
    const int64_t past = reinterpret_cast<uintptr_t>(terms.out) / sizeof(T) % BLOCK;
    if (past && length > BLOCK) next(BLOCK - past);  // then whole blocks are aligned
    while (start + BLOCK <= length) next(BLOCK);
    if (start < length) next(length - start);
    return largest < magnitude(std::numeric_limits<T>::infinity());
}

FOR_EACH_PROCESSOR bool add_pass_anywhere(const Terms<float> &terms, int64_t length, float threshold, int64_t first,
                                          CandidateBuffer<float> &buffer) {
    return pass<true>(terms, length, threshold, first, buffer);
}
FOR_EACH_PROCESSOR bool add_pass(const Terms<double> &terms, int64_t length, double threshold, int64_t first,
                                 CandidateBuffer<double> &buffer) {
    return pass<true>(terms, length, threshold, first, buffer);
}
FOR_EACH_PROCESSOR bool read_pass_anywhere(const Terms<float> &terms, int64_t length, float threshold, int64_t first,
                                           CandidateBuffer<float> &buffer) {
    return pass<false>(terms, length, threshold, first, buffer);
}
FOR_EACH_PROCESSOR bool read_pass(const Terms<double> &terms, int64_t length, double threshold, int64_t first,
                                  CandidateBuffer<double> &buffer) {
    return pass<false>(terms, length, threshold, first, buffer);
}

#ifdef WITH_AVX512
bool avx512 = __builtin_cpu_supports("avx512f");
constexpr int64_t LANES = 64 / sizeof(float);  // of a register, and of a line
static_assert(LANES <= SLACK, "a register's elements are written at once");

// The pass over whole registers of float32, with what passes compressed in them. Stores are what it could wait for: so
// nearly always four elements are written, which hold all that passes, and no branch depends on how many those are.
template <bool ADD>
INLINE WITH_AVX512 bool compress_pass(const Terms<float> &terms, int64_t length, float threshold, int64_t first,
                                      CandidateBuffer<float> &all) {
    constexpr int FEW = 4;
    const Terms<float> t = terms;  // copies, as nothing that is stored can change them
    CandidateBuffer<float> buffer = all;
    const __m512 scales = _mm512_set1_ps(t.scale);
    const __m512i sign = _mm512_set1_epi32(0x7fffffff), infinity = _mm512_set1_epi32(0x7f800000);
    const __m512i bound = _mm512_set1_epi32(threshold > 0 ? magnitude(threshold) : 1);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t at = 0; at < length; at += LANES) {
        __m512 values;
        if (ADD) {
            values = _mm512_add_ps(_mm512_mul_ps(scales, _mm512_loadu_ps(t.residual + at)),
                                   _mm512_loadu_ps(t.gradient + at));
            if (t.stream) _mm512_stream_ps(t.out + at, values);
            else _mm512_storeu_ps(t.out + at, values);
            if (t.clear) _mm512_storeu_ps(t.gradient + at, _mm512_setzero_ps());
        } else {
            values = _mm512_loadu_ps(t.out + at);
        }
        const __m512i mine = _mm512_and_si512(_mm512_castps_si512(values), sign);
        largest = _mm512_max_epi32(largest, mine);
        if (buffer.count > buffer.capacity) continue;
        const __mmask16 passes = _mm512_mask_cmple_epi32_mask(_mm512_cmpge_epi32_mask(mine, bound), mine, infinity);
        const int count = __builtin_popcount(passes);
        const __m512 found = _mm512_maskz_compress_ps(passes, values);
        const __m512i where = _mm512_maskz_compress_epi32(passes, lanes), start = _mm512_set1_epi64(first + at);
        const __m512i low = _mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(where)), start);
        if (count > FEW) {
            const __m512i high = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(where, 1));
            _mm512_storeu_ps(buffer.values + buffer.count, found);
            _mm512_storeu_si512(buffer.indices + buffer.count, low);
            _mm512_storeu_si512(buffer.indices + buffer.count + LANES / 2, _mm512_add_epi64(high, start));
        } else {
            _mm_storeu_ps(buffer.values + buffer.count, _mm512_castps512_ps128(found));
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(buffer.indices + buffer.count), _mm512_castsi512_si256(low));
        }
        buffer.count += count;
    }
    all.count = buffer.count;
    return _mm512_reduce_max_epi32(largest) < 0x7f800000;
}

WITH_AVX512 bool compress_add(const Terms<float> &terms, int64_t length, float threshold, int64_t first,
                              CandidateBuffer<float> &buffer) {
    return compress_pass<true>(terms, length, threshold, first, buffer);
}
WITH_AVX512 bool compress_read(const Terms<float> &terms, int64_t length, float threshold, int64_t first,
                               CandidateBuffer<float> &buffer) {
    return compress_pass<false>(terms, length, threshold, first, buffer);
}
#endif

bool add_pass(const Terms<float> &terms, int64_t length, float threshold, int64_t first, CandidateBuffer<float> &buffer) {
    bool finite = true;
    int64_t done = 0;
#ifdef WITH_AVX512
    if (avx512) {
        const int64_t past = reinterpret_cast<uintptr_t>(terms.out) / sizeof(float) % LANES;
        const int64_t head = std::min(length, (LANES - past) % LANES), whole = (length - head) / LANES * LANES;
        finite = add_pass_anywhere(terms, head, threshold, first, buffer);
        finite &= compress_add(terms.from(head), whole, threshold, first + head, buffer);
        done = head + whole;
    }
#endif
    return finite & add_pass_anywhere(terms.from(done), length - done, threshold, first + done, buffer);
}
bool read_pass(const Terms<float> &terms, int64_t length, float threshold, int64_t first, CandidateBuffer<float> &buffer) {
    int64_t done = 0;
#ifdef WITH_AVX512
    if (avx512) {
        done = length / LANES * LANES;
        compress_read(terms, done, threshold, first, buffer);
    }
#endif
    return read_pass_anywhere(terms.from(done), length - done, threshold, first + done, buffer);
}

// For tests: whether to use AVX-512 where there is it; says whether it was used until now.
bool use_avx512(bool wanted) {
#ifdef WITH_AVX512
    const bool before = avx512;
    avx512 = wanted && __builtin_cpu_supports("avx512f");
    return before;
#else
    return wanted && false;
#endif
}

template <class T> using Array = py::array_t<T, py::array::c_style>;

template <class T> CandidateBuffer<T> buffer_of(Array<int64_t> &indices, Array<T> &values, int64_t count) {
    if (indices.size() != values.size() || indices.size() < SLACK || count < 0)
        throw std::invalid_argument("room: indices and values of one length, SLACK more than its capacity");
    return {indices.mutable_data(), values.mutable_data(), count, indices.size() - SLACK};
}

template <class T>
std::pair<bool, int64_t> add_and_collect(const Array<T> &residual, Array<T> &gradient, Array<T> &out, T scale,
                                         T threshold, int64_t first, Array<int64_t> &indices, Array<T> &values,
                                         int64_t count, bool stream, bool clear) {
    if (residual.size() != gradient.size() || out.size() != gradient.size())
        throw std::invalid_argument("residual, gradient and sum must have one length");
    CandidateBuffer<T> buffer = buffer_of(indices, values, count);
    T *read = clear ? gradient.mutable_data() : const_cast<T *>(gradient.data());  // not written, if not to be cleared
    const Terms<T> terms{residual.data(), read, out.mutable_data(), scale, stream, clear};
    py::gil_scoped_release released;
    const bool finite = add_pass(terms, gradient.size(), threshold, first, buffer);
    return {finite, buffer.count};
}

template <class T>
int64_t collect(Array<T> &acc, T threshold, int64_t first, Array<int64_t> &indices, Array<T> &values, int64_t count) {
    CandidateBuffer<T> buffer = buffer_of(indices, values, count);
    T *data = acc.mutable_data();
    py::gil_scoped_release released;
    read_pass({data, data, data, 1, false, false}, acc.size(), threshold, first, buffer);
    return buffer.count;
}

template <class T>
int64_t keep_passing(const int64_t *index, const T *value, int64_t size, T threshold, int64_t *to_index, T *to_value) {
    using Int = typename Integer<T>::type;
    const Int bound = threshold > 0 ? magnitude(threshold) : 1;
    const Int infinity = magnitude(std::numeric_limits<T>::infinity());
    int64_t count = 0;
    for (int64_t i = 0; i < size; ++i) {  // no branches: they could not be predicted
        const Int mine = magnitude(value[i]);
        to_index[count] = index[i];
        to_value[count] = value[i];
        count += (mine >= bound) & (mine <= infinity);
    }
    return count;
}

#ifdef WITH_AVX512
WITH_AVX512 int64_t compress_passing(const int64_t *index, const float *value, int64_t size, float threshold,
                                     int64_t *to_index, float *to_value) {
    const __m512i sign = _mm512_set1_epi32(0x7fffffff), infinity = _mm512_set1_epi32(0x7f800000);
    const __m512i bound = _mm512_set1_epi32(threshold > 0 ? magnitude(threshold) : 1);
    int64_t count = 0, done = 0;
    for (; done + LANES <= size; done += LANES) {
        const __m512 values = _mm512_loadu_ps(value + done);
        const __m512i mine = _mm512_and_si512(_mm512_castps_si512(values), sign);
        const __mmask16 passes = _mm512_mask_cmple_epi32_mask(_mm512_cmpge_epi32_mask(mine, bound), mine, infinity);
        _mm512_storeu_ps(to_value + count, _mm512_maskz_compress_ps(passes, values));
        for (int half = 0; half < 2; ++half) {
            const __mmask8 here = static_cast<__mmask8>(passes >> 8 * half);
            const __m512i indices = _mm512_loadu_si512(index + done + 8 * half);
            _mm512_storeu_si512(to_index + count, _mm512_maskz_compress_epi64(here, indices));
            count += __builtin_popcount(here);
        }
    }
    return count + keep_passing(index + done, value + done, size - done, threshold, to_index + count,
                                to_value + count);
}
#endif

int64_t find_passing(const int64_t *index, const float *value, int64_t size, float threshold, int64_t *to_index,
                     float *to_value) {
#ifdef WITH_AVX512
    if (avx512) return compress_passing(index, value, size, threshold, to_index, to_value);
#endif
    return keep_passing(index, value, size, threshold, to_index, to_value);
}
int64_t find_passing(const int64_t *index, const double *value, int64_t size, double threshold, int64_t *to_index,
                     double *to_value) {
    return keep_passing(index, value, size, threshold, to_index, to_value);
}

template <class T>
std::pair<Array<int64_t>, Array<T>> passing(const Array<int64_t> &indices, const Array<T> &values, T threshold) {
    const int64_t size = values.size();
    if (indices.size() != size) throw std::invalid_argument("as many indices as values");
    Array<int64_t> out_indices(size + SLACK);
    Array<T> out_values(size + SLACK);
    int64_t *to_index = out_indices.mutable_data(), count = 0;
    T *to_value = out_values.mutable_data();
    {
        py::gil_scoped_release released;
        count = find_passing(indices.data(), values.data(), size, threshold, to_index, to_value);
    }
    out_indices.resize({count}, false);
    out_values.resize({count}, false);
    return {out_indices, out_values};
}

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

// In windows of the index space, in which a bit for each index tells whether `other` has it.
int64_t find_common(const int64_t *mine, const int64_t *mine_end, const int64_t *other, const int64_t *other_end,
                    int64_t *positions) {
    constexpr uint64_t SPAN = uint64_t{1} << 17;
    std::vector<uint64_t> present(SPAN / 64);
    const int64_t *const first = mine;
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

// Ascending, by radix: from the lowest digit to the highest, as the order within equal digits is kept.
template <class U> Array<U> sorted(const Array<U> &numbers) {
    constexpr int BITS = 11, DIGITS = (8 * sizeof(U) + BITS - 1) / BITS;
    const int64_t count = numbers.size();
    Array<U> result(count), spare(count);
    const U *from = numbers.data();
    U *to = result.mutable_data(), *other = spare.mutable_data();
    bool swapped = false;
    {
        py::gil_scoped_release released;
        std::vector<int64_t> starts(DIGITS << BITS);
        for (int64_t i = 0; i < count; ++i)
            for (int digit = 0; digit < DIGITS; ++digit)
                ++starts[(digit << BITS) + (from[i] >> (BITS * digit) & ((1 << BITS) - 1))];
        for (int digit = 0; digit < DIGITS; ++digit) {
            int64_t *start = &starts[digit << BITS], before = 0;
            for (int value = 0; value < 1 << BITS; ++value) before += std::exchange(start[value], before);
            for (int64_t i = 0; i < count; ++i) to[start[from[i] >> (BITS * digit) & ((1 << BITS) - 1)]++] = from[i];
            from = to;
            std::swap(to, other);
        }
        swapped = from != result.data();
    }
    return swapped ? spare : result;
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

// Elias-Fano: of each offset from start, the lower bits one after the other; the upper part of the i-th as a one at
// bit upper + i. Both in words of 32 bits, the lowest bit first.
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
            const uint64_t at = (offset >> low_bits) + i;
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
                for (uint64_t high = 32 * word - found; bits; bits &= bits - 1, bit += low_bits, --high) {
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

// brain: bfloat16, and otherwise float16.
template <class T> Array<uint16_t> to_half(const Array<T> &values, bool brain) {
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
        round_all(singles, length, brain, half + start);
    }
    return halves;
}
template <class T> Array<T> from_half(const Array<uint16_t> &halves, bool brain) {
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

// write(out[index], i) for the i-th index; all lie within.
template <class T, class Write> void write_at(T *out, const int64_t *index, int64_t count, Write write) {
    constexpr int64_t AHEAD = 128;  // elements that are fetched while the ones before them are written
    for (int64_t i = 0; i < count; ++i) {
        if (i + AHEAD < count) __builtin_prefetch(out + index[i + AHEAD], 0, 2);  // to L2, which awaits more lines
        write(out[index[i]], i);
    }
}

template <class T, class Write> void write_within(Array<T> &out, const Array<int64_t> &indices, Write write) {
    const int64_t *index = indices.data(), count = indices.size();
    const uint64_t size = static_cast<uint64_t>(out.size());
    T *data = out.mutable_data();
    bool within = true;
    {
        py::gil_scoped_release released;
        for (int64_t i = 0; i < count; ++i) within &= static_cast<uint64_t>(index[i]) < size;
        if (within) write_at(data, index, count, write);
    }
    if (!within) throw std::out_of_range("an index lies outside of the array");
}

template <class T> void clear(Array<T> &out, const Array<int64_t> &indices) {
    write_within(out, indices, [](T &element, int64_t) { element = 0; });
}

template <class T> void add(Array<T> &out, const Array<int64_t> &indices, const Array<T> &values) {
    if (values.size() != indices.size()) throw std::invalid_argument("as many indices as values");
    write_within(out, indices, [value = values.data()](T &element, int64_t i) { element += value[i]; });
}

// zero: whether out is zero already.
template <class T>
void scatter(Array<T> &out, const Array<int64_t> &indices, const Array<T> &values, bool zero) {
    const int64_t count = indices.size();
    if (values.size() != count) throw std::invalid_argument("as many indices as values");
    const int64_t *index = indices.data();
    const T *value = values.data();
    T *data = out.mutable_data();
    bool valid = count == 0 || (index[0] >= 0 && index[count - 1] < out.size());
    {
        py::gil_scoped_release released;
        for (int64_t i = 1; i < count; ++i) valid &= index[i - 1] < index[i];
        if (valid && !zero) std::memset(data, 0, sizeof(T) * out.size());
        if (valid) write_at(data, index, count, [value](T &element, int64_t i) { element = value[i]; });
    }
    if (!valid) throw std::out_of_range("the indices must ascend, and lie within the array");
}

template <class T> void define(py::module_ &module) {
    module.def("add_and_collect", &add_and_collect<T>, py::arg("residual").noconvert(),
               py::arg("gradient").noconvert(), py::arg("out").noconvert(), py::arg("scale"), py::arg("threshold"),
               py::arg("first"), py::arg("indices").noconvert(), py::arg("values").noconvert(), py::arg("count"),
               py::arg("stream"), py::arg("clear"));
    module.def("collect", &collect<T>, py::arg("acc").noconvert(), py::arg("threshold"), py::arg("first"),
               py::arg("indices").noconvert(), py::arg("values").noconvert(), py::arg("count"));
    module.def("clear", &clear<T>, py::arg("out").noconvert(), py::arg("indices").noconvert());
    module.def("add", &add<T>, py::arg("out").noconvert(), py::arg("indices").noconvert(),
               py::arg("values").noconvert());
    module.def("scatter", &scatter<T>, py::arg("out").noconvert(), py::arg("indices").noconvert(),
               py::arg("values").noconvert(), py::arg("zero"));
    module.def("passing", &passing<T>, py::arg("indices").noconvert(), py::arg("values").noconvert(),
               py::arg("threshold"));
    module.def("to_half", &to_half<T>, py::arg("values").noconvert(), py::arg("brain"));
    module.def("kth_magnitude", &kth_magnitude<T>, py::arg("values").noconvert(), py::arg("k"));
    module.def("sum_parts", &sum_parts<T>, py::arg("indices").noconvert(), py::arg("values").noconvert());
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "The kernels of kernels.py in C++.";
    module.attr("SLACK") = SLACK;
    module.attr("SAMPLE") = SAMPLE;
    module.def("use_avx512", &use_avx512, py::arg("wanted"));
    define<float>(module);
    define<double>(module);
    module.def("pack_indices", &pack_indices, py::arg("indices").noconvert(), py::arg("start"), py::arg("low_bits"),
               py::arg("low_words"), py::arg("upper_words"));
    module.def("unpack_indices", &unpack_indices, py::arg("words").noconvert(), py::arg("count"), py::arg("start"),
               py::arg("stop"), py::arg("low_bits"), py::arg("low_words"));
    module.def("single_from_half", &from_half<float>, py::arg("halves").noconvert(), py::arg("brain"));
    module.def("double_from_half", &from_half<double>, py::arg("halves").noconvert(), py::arg("brain"));
    module.def("sorted", &sorted<uint32_t>, py::arg("numbers").noconvert());
    module.def("sorted", &sorted<uint64_t>, py::arg("numbers").noconvert());
    module.def("common_positions", &common_positions, py::arg("mine").noconvert(), py::arg("other").noconvert());
}
