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
#include <cstdint>
#include <cstring>
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
#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#else
#define INLINE inline
#define INLINE_LAMBDA
#endif

namespace {

constexpr int64_t BLOCK = 32;                 // elements that are looked at one by one only if one of them passes
static_assert(BLOCK <= 32, "a block's passing elements are bits of 32");
constexpr int64_t SLACK = 2 * BLOCK;          // that a full room has left: for one block, written in whole registers
constexpr int64_t WINDOW = int64_t{1} << 14;  // elements that are summed or written at a time, in the cache

template <class T> struct Integer;
template <> struct Integer<float> { using type = int32_t; };
template <> struct Integer<double> { using type = int64_t; };

template <class T> INLINE typename Integer<T>::type magnitude(T value) {
    typename Integer<T>::type bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits & std::numeric_limits<typename Integer<T>::type>::max();
}

template <class T> struct Sink {  // room for capacity + SLACK elements; full once count > capacity
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

// One block; returns its largest magnitude. ADD: out = scale * residual + gradient; otherwise out is read.
template <bool ADD, class T>
INLINE auto block(const T *residual, const T *gradient, T *out, int64_t length, T scale,
                  typename Integer<T>::type bound, int64_t first, bool stream, Sink<T> &sink) {
    using Int = typename Integer<T>::type;
    alignas(64) T values[BLOCK];
    Int largest = 0;
    for (int64_t i = 0; i < length; ++i) {
        values[i] = ADD ? scale * residual[i] + gradient[i] : out[i];
        largest = std::max(largest, magnitude(values[i]));
    }
    if (ADD) store(values, out, length, stream);
    if (largest >= bound && sink.count <= sink.capacity) {
        const Int infinity = magnitude(std::numeric_limits<T>::infinity());
        uint32_t passes = 0;
        for (int64_t i = 0; i < length; ++i) {
            const Int mine = magnitude(values[i]);
            passes |= static_cast<uint32_t>((mine >= bound) & (mine <= infinity)) << i;
        }
        for (; passes; passes &= passes - 1) {
            const int i = __builtin_ctz(passes);
            sink.indices[sink.count] = first + i;
            sink.values[sink.count++] = values[i];
        }
    }
    return largest;
}

template <bool ADD, class T>
INLINE bool pass(const T *residual, const T *gradient, T *out, int64_t length, T scale, T threshold, int64_t first,
                 bool stream, Sink<T> &sink) {
    using Int = typename Integer<T>::type;
    const Int bound = threshold > 0 ? magnitude(threshold) : 1;  // 1: the least number that is not zero
    Int largest = 0;
    int64_t start = 0;
    const auto next = [&](int64_t count) INLINE_LAMBDA {
        largest = std::max(largest, block<ADD, T>(residual + start, gradient + start, out + start, count, scale, bound,
                                                  first + start, stream, sink));
        start += count;
    };
    const int64_t past = reinterpret_cast<uintptr_t>(out) / sizeof(T) % BLOCK;
    if (past && length > BLOCK) next(BLOCK - past);  // then whole blocks are aligned
    while (start + BLOCK <= length) next(BLOCK);
    if (start < length) next(length - start);
    return largest < magnitude(std::numeric_limits<T>::infinity());
}

FOR_EACH_PROCESSOR bool add_pass_anywhere(const float *residual, const float *gradient, float *out, int64_t length, float scale,
                                 float threshold, int64_t first, bool stream, Sink<float> &sink) {
    return pass<true>(residual, gradient, out, length, scale, threshold, first, stream, sink);
}
FOR_EACH_PROCESSOR bool add_pass(const double *residual, const double *gradient, double *out, int64_t length,
                                 double scale, double threshold, int64_t first, bool stream,
                                 Sink<double> &sink) {
    return pass<true>(residual, gradient, out, length, scale, threshold, first, stream, sink);
}
FOR_EACH_PROCESSOR bool read_pass_anywhere(float *out, int64_t length, float threshold, int64_t first,
                                           Sink<float> &sink) {
    return pass<false, float>(out, out, out, length, 1, threshold, first, false, sink);
}
FOR_EACH_PROCESSOR bool read_pass(double *out, int64_t length, double threshold, int64_t first, Sink<double> &sink) {
    return pass<false, double>(out, out, out, length, 1, threshold, first, false, sink);
}

#ifdef WITH_AVX512
bool avx512 = __builtin_cpu_supports("avx512f");

// The pass over aligned whole blocks of float32, with what passes compressed in registers: half the time.
template <bool ADD>
INLINE WITH_AVX512 bool compress_pass(const float *residual, const float *gradient, float *out, int64_t length,
                                      float scale, float threshold, int64_t first, bool stream, Sink<float> &sink) {
    constexpr int64_t LANES = 16;
    static_assert(BLOCK == 2 * LANES, "a block is two registers");
    const __m512 scales = _mm512_set1_ps(scale);
    const __m512i sign = _mm512_set1_epi32(0x7fffffff), infinity = _mm512_set1_epi32(0x7f800000);
    const __m512i bound = _mm512_set1_epi32(threshold > 0 ? magnitude(threshold) : 1);
    const __m512i lanes = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t start = 0; start < length; start += BLOCK) {
        __m512 values[2];
        __mmask16 passes[2];
        for (int half = 0; half < 2; ++half) {
            const int64_t at = start + half * LANES;
            if (ADD) {
                values[half] = _mm512_add_ps(_mm512_mul_ps(scales, _mm512_loadu_ps(residual + at)),
                                             _mm512_loadu_ps(gradient + at));
                if (stream) _mm512_stream_ps(out + at, values[half]);
                else _mm512_storeu_ps(out + at, values[half]);
            } else {
                values[half] = _mm512_loadu_ps(out + at);
            }
            const __m512i mine = _mm512_and_si512(_mm512_castps_si512(values[half]), sign);
            largest = _mm512_max_epi32(largest, mine);
            passes[half] = _mm512_mask_cmple_epi32_mask(_mm512_cmpge_epi32_mask(mine, bound), mine, infinity);
        }
        if (!(passes[0] | passes[1]) || sink.count > sink.capacity) continue;
        for (int half = 0; half < 2; ++half) {
            const __m512i low = _mm512_add_epi64(lanes, _mm512_set1_epi64(first + start + half * LANES));
            const __mmask8 low_passes = static_cast<__mmask8>(passes[half]);
            const __mmask8 high_passes = static_cast<__mmask8>(passes[half] >> 8);
            _mm512_storeu_ps(sink.values + sink.count, _mm512_maskz_compress_ps(passes[half], values[half]));
            _mm512_storeu_si512(sink.indices + sink.count, _mm512_maskz_compress_epi64(low_passes, low));
            sink.count += __builtin_popcount(low_passes);
            const __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(LANES / 2));
            _mm512_storeu_si512(sink.indices + sink.count, _mm512_maskz_compress_epi64(high_passes, high));
            sink.count += __builtin_popcount(high_passes);
        }
    }
    return _mm512_reduce_max_epi32(largest) < 0x7f800000;
}

WITH_AVX512 bool compress_add(const float *residual, const float *gradient, float *out, int64_t length, float scale,
                              float threshold, int64_t first, bool stream, Sink<float> &sink) {
    return compress_pass<true>(residual, gradient, out, length, scale, threshold, first, stream, sink);
}
WITH_AVX512 bool compress_read(float *out, int64_t length, float threshold, int64_t first, Sink<float> &sink) {
    return compress_pass<false>(out, out, out, length, 1, threshold, first, false, sink);
}
#endif

bool add_pass(const float *residual, const float *gradient, float *out, int64_t length, float scale, float threshold,
              int64_t first, bool stream, Sink<float> &sink) {
    bool finite = true;
    int64_t done = 0;
#ifdef WITH_AVX512
    if (avx512) {
        constexpr int64_t LINE = 64 / sizeof(float);  // a register's alignment
        const int64_t past = reinterpret_cast<uintptr_t>(out) / sizeof(float) % LINE;
        const int64_t head = std::min(length, (LINE - past) % LINE), whole = (length - head) / BLOCK * BLOCK;
        finite = add_pass_anywhere(residual, gradient, out, head, scale, threshold, first, false, sink);
        finite &= compress_add(residual + head, gradient + head, out + head, whole, scale, threshold, first + head,
                               stream, sink);
        done = head + whole;
    }
#endif
    return finite & add_pass_anywhere(residual + done, gradient + done, out + done, length - done, scale, threshold,
                                      first + done, stream, sink);
}
bool read_pass(float *out, int64_t length, float threshold, int64_t first, Sink<float> &sink) {
    int64_t done = 0;
#ifdef WITH_AVX512
    if (avx512) {
        done = length / BLOCK * BLOCK;
        compress_read(out, done, threshold, first, sink);
    }
#endif
    return read_pass_anywhere(out + done, length - done, threshold, first + done, sink);
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

template <class T> Sink<T> sink_of(Array<int64_t> &indices, Array<T> &values, int64_t count) {
    if (indices.size() != values.size() || indices.size() < SLACK || count < 0)
        throw std::invalid_argument("room: indices and values of one length, SLACK more than its capacity");
    return {indices.mutable_data(), values.mutable_data(), count, indices.size() - SLACK};
}

template <class T>
std::pair<bool, int64_t> add_and_collect(const Array<T> &residual, const Array<T> &gradient, Array<T> &out, T scale,
                                         T threshold, int64_t first, Array<int64_t> &indices, Array<T> &values,
                                         int64_t count, bool stream) {
    if (residual.size() != gradient.size() || out.size() != gradient.size())
        throw std::invalid_argument("residual, gradient and sum must have one length");
    Sink<T> sink = sink_of(indices, values, count);
    T *sum = out.mutable_data();
    py::gil_scoped_release released;
    const bool finite = add_pass(residual.data(), gradient.data(), sum, gradient.size(), scale, threshold, first,
                                 stream, sink);
    return {finite, sink.count};
}

template <class T>
int64_t collect(Array<T> &acc, T threshold, int64_t first, Array<int64_t> &indices, Array<T> &values, int64_t count) {
    Sink<T> sink = sink_of(indices, values, count);
    T *data = acc.mutable_data();
    py::gil_scoped_release released;
    read_pass(data, acc.size(), threshold, first, sink);
    return sink.count;
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
                const uint64_t bit = uint64_t{1} << (at % 64);
                sums[at] = (present[at / 64] & bit ? sums[at] : T(0)) + *part.value;
                present[at / 64] |= bit;
            }
        for (int64_t word = 0; word < WINDOW / 64; ++word) {
            for (uint64_t bits = present[word]; bits; bits &= bits - 1) {
                const int64_t at = 64 * word + __builtin_ctzll(bits);
                indices[count] = base + at;
                values[count++] = sums[at];
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

Array<int64_t> common_positions(const Array<int64_t> &mine, const Array<int64_t> &other) {
    const int64_t *left = mine.data(), *right = other.data();
    const int64_t left_size = mine.size(), right_size = other.size();
    Array<int64_t> found(std::min(left_size, right_size) + 1);
    int64_t *out = found.mutable_data(), count = 0;
    {
        py::gil_scoped_release released;
        for (int64_t i = 0, j = 0; i < left_size && j < right_size;) {  // no branches: they could not be predicted
            const int64_t a = left[i], b = right[j];
            out[count] = i;
            count += a == b;
            i += a <= b;
            j += b <= a;
        }
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

// By radix as well: a histogram of the highest digit tells in which bin the k-th largest lies (k from 1); only that
// bin's numbers go on to the next digit.
template <class U> U kth_largest(const Array<U> &numbers, int64_t k) {
    constexpr int BITS = 11, TABLES = 4;  // equal digits in a row would wait for each other in one table
    int64_t count = numbers.size();
    if (k < 1 || k > count) throw std::invalid_argument("k from 1 to the length");
    py::gil_scoped_release released;
    const U *from = numbers.data();
    std::vector<U> bin(count + 1);
    for (int shift = 8 * sizeof(U); shift > 0;) {
        const int bits = std::min(BITS, shift), mask = (1 << bits) - 1;
        shift -= bits;
        std::vector<int64_t> counts(TABLES << bits);
        for (int64_t i = 0; i < count; ++i) ++counts[(i % TABLES << bits) + (from[i] >> shift & mask)];
        int digit = mask;
        for (;; --digit) {
            int64_t mine = 0;
            for (int table = 0; table < TABLES; ++table) mine += counts[(table << bits) + digit];
            if (k <= mine) break;
            k -= mine;
        }
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {  // no branches: they could not be predicted
            const U number = from[i];
            bin[kept] = number;  // perhaps the same memory, but never ahead of what is read
            kept += static_cast<int>(number >> shift & mask) == digit;
        }
        from = bin.data();
        count = kept;
    }
    return from[0];
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
    const uint32_t *low = words.data(), *upper = low + low_words;
    const uint64_t mask = (uint64_t{1} << low_bits) - 1, span = static_cast<uint64_t>(stop - start);
    {
        py::gil_scoped_release released;
        uint64_t least = 0;  // what the next offset must be at least
        bool valid = true;
        for (int64_t word = 0; word < upper_words; ++word)
            for (uint32_t bits = upper[word]; bits; bits &= bits - 1) {
                if (found == count) {
                    valid = false;
                    break;
                }
                const uint64_t bit = static_cast<uint64_t>(found) * low_bits, shift = bit % 32;
                uint64_t pair = 0;
                if (low_bits) {
                    pair = low[bit / 32];
                    if (shift + low_bits > 32) pair |= static_cast<uint64_t>(low[bit / 32 + 1]) << 32;
                }
                const uint64_t high = 32 * word + __builtin_ctz(bits) - found;
                const uint64_t offset = high << low_bits | (pair >> shift & mask);
                valid &= (offset >= least) & (offset < span);
                least = offset + 1;
                out[found++] = start + static_cast<int64_t>(offset);
            }
        if (!valid) found = 0;
    }
    if (found != count) indices.resize({0}, false);
    return indices;
}

// out[indices] = 0.
template <class T> void clear(Array<T> &out, const Array<int64_t> &indices) {
    constexpr int64_t AHEAD = 24;  // elements that are fetched while the ones before them are written
    const int64_t *index = indices.data(), count = indices.size();
    const uint64_t size = static_cast<uint64_t>(out.size());
    T *data = out.mutable_data();
    bool within = true;
    {
        py::gil_scoped_release released;
        for (int64_t i = 0; i < count; ++i) within &= static_cast<uint64_t>(index[i]) < size;
        for (int64_t i = 0; within && i < count; ++i) {
            if (i + AHEAD < count) __builtin_prefetch(data + index[i + AHEAD], 1);
            data[index[i]] = T(0);
        }
    }
    if (!within) throw std::out_of_range("an index lies outside of the array");
}

// out = 0, but for out[indices] = values; window by window, so that values meet lines that are in the cache.
template <class T> void scatter(Array<T> &out, const Array<int64_t> &indices, const Array<T> &values) {
    const int64_t count = indices.size(), size = out.size();
    if (values.size() != count) throw std::invalid_argument("as many indices as values");
    const int64_t *index = indices.data();
    const T *value = values.data();
    T *data = out.mutable_data();
    bool valid = count == 0 || (index[0] >= 0 && index[count - 1] < size);
    {
        py::gil_scoped_release released;
        for (int64_t i = 1; i < count; ++i) valid &= index[i - 1] < index[i];
        for (int64_t start = 0, next = 0; valid && start < size; start += WINDOW) {
            const int64_t stop = std::min(start + WINDOW, size);
            std::fill(data + start, data + stop, T(0));
            for (; next < count && index[next] < stop; ++next) data[index[next]] = value[next];
        }
    }
    if (!valid) throw std::out_of_range("the indices must ascend, and lie within the array");
}

template <class T> void define(py::module_ &module) {
    module.def("add_and_collect", &add_and_collect<T>, py::arg("residual").noconvert(),
               py::arg("gradient").noconvert(), py::arg("out").noconvert(), py::arg("scale"), py::arg("threshold"),
               py::arg("first"), py::arg("indices").noconvert(), py::arg("values").noconvert(), py::arg("count"),
               py::arg("stream"));
    module.def("collect", &collect<T>, py::arg("acc").noconvert(), py::arg("threshold"), py::arg("first"),
               py::arg("indices").noconvert(), py::arg("values").noconvert(), py::arg("count"));
    module.def("clear", &clear<T>, py::arg("out").noconvert(), py::arg("indices").noconvert());
    module.def("scatter", &scatter<T>, py::arg("out").noconvert(), py::arg("indices").noconvert(),
               py::arg("values").noconvert());
    module.def("sum_parts", &sum_parts<T>, py::arg("indices").noconvert(), py::arg("values").noconvert());
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "The kernels of kernels.py in C++.";
    module.attr("SLACK") = SLACK;
    module.def("use_avx512", &use_avx512, py::arg("wanted"));
    define<float>(module);
    define<double>(module);
    module.def("pack_indices", &pack_indices, py::arg("indices").noconvert(), py::arg("start"), py::arg("low_bits"),
               py::arg("low_words"), py::arg("upper_words"));
    module.def("unpack_indices", &unpack_indices, py::arg("words").noconvert(), py::arg("count"), py::arg("start"),
               py::arg("stop"), py::arg("low_bits"), py::arg("low_words"));
    module.def("sorted", &sorted<uint32_t>, py::arg("numbers").noconvert());
    module.def("sorted", &sorted<uint64_t>, py::arg("numbers").noconvert());
    module.def("kth_largest", &kth_largest<uint32_t>, py::arg("numbers").noconvert(), py::arg("k"));
    module.def("kth_largest", &kth_largest<uint64_t>, py::arg("numbers").noconvert(), py::arg("k"));
    module.def("common_positions", &common_positions, py::arg("mine").noconvert(), py::arg("other").noconvert());
}
