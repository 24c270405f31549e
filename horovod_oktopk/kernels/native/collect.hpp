// One pass over all elements: a sum, a difference, or one array; whether all is finite, and what passes the threshold.
#pragma once

#include "blocks.hpp"

namespace {

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

// What a pass looks at.
enum class Of {
    SUM,         // out = scale * residual + gradient, which is written
    SUMS,        // out = scale * residual + (the gradient and others, added up in order), which is written
    DIFFERENCE,  // residual - gradient, which is written nowhere
    ARRAY        // out
};

template <class T> struct Terms {
    const T *residual;
    T *gradient, *out;
    T scale;
    bool stream, clear;  // past the cache; the gradient is zero afterwards, which costs nothing while it is in the cache
    const T *const *summands = nullptr;  // in order, the gradient among them
    int64_t count = 0, offset = 0;       // of them; where in them this is

    INLINE Terms from(int64_t start) const {
        return {residual + start, gradient + start, out + start, scale, stream, clear, summands, count, offset + start};
    }
};

constexpr bool is_written(Of of) { return of == Of::SUM || of == Of::SUMS; }

// One block's elements.
template <Of OF, class T> INLINE void evaluate(const Terms<T> &terms, int64_t length, T *values) {
    const Terms<T> t = terms;
    if (OF == Of::SUMS) {
        const T *first = t.summands[0] + t.offset;
        for (int64_t i = 0; i < length; ++i) values[i] = first[i];
        for (int64_t j = 1; j < t.count; ++j) {
            const T *next = t.summands[j] + t.offset;
            for (int64_t i = 0; i < length; ++i) values[i] += next[i];
        }
    }
    for (int64_t i = 0; i < length; ++i) {
        if (OF == Of::SUMS) values[i] = t.scale * t.residual[i] + values[i];
        else if (OF == Of::SUM) values[i] = t.scale * t.residual[i] + t.gradient[i];
        else values[i] = OF == Of::DIFFERENCE ? t.residual[i] - t.gradient[i] : t.out[i];
    }
}

// One block; returns its largest magnitude.
template <Of OF, class T>
INLINE auto block(const Terms<T> &terms, int64_t length, typename Integer<T>::type bound, int64_t first,
                  CandidateBuffer<T> &buffer) {
    using Int = typename Integer<T>::type;
    alignas(64) T values[BLOCK];
    Int largest = 0;
    evaluate<OF>(terms, length, values);
    for (int64_t i = 0; i < length; ++i) largest = std::max(largest, magnitude(values[i]));
    if (is_written(OF)) store(values, terms.out, length, terms.stream);
    if (is_written(OF) && terms.clear) std::memset(terms.gradient, 0, sizeof(T) * length);
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

template <Of OF, class T>
INLINE bool pass(const Terms<T> &terms, int64_t length, T threshold, int64_t first, CandidateBuffer<T> &buffer) {
    using Int = typename Integer<T>::type;
    const Int bound = threshold > 0 ? magnitude(threshold) : 1;  // 1: the least number that is not zero
    Int largest = 0;
    int64_t start = 0;
    const auto next = [&](int64_t count) INLINE_LAMBDA {
        largest = std::max(largest, block<OF, T>(terms.from(start), count, bound, first + start, buffer));
        start += count;
    };
    const int64_t past = reinterpret_cast<uintptr_t>(terms.out) / sizeof(T) % BLOCK;
    if (past && length > BLOCK) next(BLOCK - past);  // then whole blocks are aligned
    while (start + BLOCK <= length) next(BLOCK);
    if (start < length) next(length - start);
    return largest < magnitude(std::numeric_limits<T>::infinity());
}

template <class T>
INLINE bool pass_of(Of of, const Terms<T> &terms, int64_t length, T threshold, int64_t first,
                    CandidateBuffer<T> &buffer) {
    switch (of) {
        case Of::SUM: return pass<Of::SUM>(terms, length, threshold, first, buffer);
        case Of::SUMS: return pass<Of::SUMS>(terms, length, threshold, first, buffer);
        case Of::DIFFERENCE: return pass<Of::DIFFERENCE>(terms, length, threshold, first, buffer);
        default: return pass<Of::ARRAY>(terms, length, threshold, first, buffer);
    }
}

// A template has no versions for each processor.
FOR_EACH_PROCESSOR bool pass_anywhere(Of of, const Terms<float> &terms, int64_t length, float threshold, int64_t first,
                                      CandidateBuffer<float> &buffer) {
    return pass_of(of, terms, length, threshold, first, buffer);
}
FOR_EACH_PROCESSOR bool best_pass(Of of, const Terms<double> &terms, int64_t length, double threshold, int64_t first,
                                  CandidateBuffer<double> &buffer) {
    return pass_of(of, terms, length, threshold, first, buffer);
}

#ifdef WITH_AVX512
// The pass over whole registers of float32, with what passes compressed in them. Stores are what it could wait for: so
// nearly always four elements are written, which hold all that passes, and no branch depends on how many those are.
template <Of OF>
INLINE WITH_AVX512 bool compress_pass(const Terms<float> &terms, int64_t length, float threshold, int64_t first,
                                      CandidateBuffer<float> &all) {
    constexpr int FEW = 4, AHEAD = 1024;  // elements that are fetched before the processor's own prefetchers do
    const Terms<float> t = terms;  // copies, as nothing that is stored can change them
    CandidateBuffer<float> buffer = all;
    const __m512 scales = _mm512_set1_ps(t.scale);
    const __m512i sign = _mm512_set1_epi32(0x7fffffff), infinity = _mm512_set1_epi32(0x7f800000);
    const __m512i bound = _mm512_set1_epi32(threshold > 0 ? magnitude(threshold) : 1);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t at = 0; at < length; at += LANES) {
        __m512 values;
        if (OF != Of::ARRAY) {
            _mm_prefetch(reinterpret_cast<const char *>(t.residual + at + AHEAD), _MM_HINT_T0);
            if (OF != Of::SUMS) _mm_prefetch(reinterpret_cast<const char *>(t.gradient + at + AHEAD), _MM_HINT_T0);
        }
        if (is_written(OF)) {
            __m512 total = _mm512_loadu_ps(OF == Of::SUM ? t.gradient + at : t.summands[0] + t.offset + at);
            if (OF == Of::SUMS) {
                _mm_prefetch(reinterpret_cast<const char *>(t.summands[0] + t.offset + at + AHEAD), _MM_HINT_T0);
                for (int64_t j = 1; j < t.count; ++j) {
                    const float *next = t.summands[j] + t.offset + at;
                    _mm_prefetch(reinterpret_cast<const char *>(next + AHEAD), _MM_HINT_T0);
                    total = _mm512_add_ps(total, _mm512_loadu_ps(next));
                }
            }
            values = _mm512_add_ps(_mm512_mul_ps(scales, _mm512_loadu_ps(t.residual + at)), total);
            if (t.stream) _mm512_stream_ps(t.out + at, values);
            else _mm512_storeu_ps(t.out + at, values);
            if (t.clear) _mm512_storeu_ps(t.gradient + at, _mm512_setzero_ps());
        } else if (OF == Of::DIFFERENCE) {
            values = _mm512_sub_ps(_mm512_loadu_ps(t.residual + at), _mm512_loadu_ps(t.gradient + at));
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

WITH_AVX512 bool compress(Of of, const Terms<float> &terms, int64_t length, float threshold, int64_t first,
                          CandidateBuffer<float> &buffer) {
    switch (of) {
        case Of::SUM: return compress_pass<Of::SUM>(terms, length, threshold, first, buffer);
        case Of::SUMS: return compress_pass<Of::SUMS>(terms, length, threshold, first, buffer);
        case Of::DIFFERENCE: return compress_pass<Of::DIFFERENCE>(terms, length, threshold, first, buffer);
        default: return compress_pass<Of::ARRAY>(terms, length, threshold, first, buffer);
    }
}
#endif

// As for float64, but whole registers are compressed where there is AVX-512.
bool best_pass(Of of, const Terms<float> &terms, int64_t length, float threshold, int64_t first,
               CandidateBuffer<float> &buffer) {
    bool finite = true;
    int64_t done = 0;
#ifdef WITH_AVX512
    if (avx512) {
        const int64_t past = is_written(of) ? reinterpret_cast<uintptr_t>(terms.out) / sizeof(float) % LANES : 0;
        const int64_t head = std::min(length, (LANES - past) % LANES), whole = (length - head) / LANES * LANES;
        finite = pass_anywhere(of, terms, head, threshold, first, buffer);
        finite &= compress(of, terms.from(head), whole, threshold, first + head, buffer);
        done = head + whole;
    }
#endif
    return finite & pass_anywhere(of, terms.from(done), length - done, threshold, first + done, buffer);
}

template <class U> Array<U> array_of(const py::object &buffer, const char *name) {
    const py::object array = buffer.attr(name);
    if (!py::isinstance<Array<U>>(array)) throw py::type_error(std::string("a buffer's ") + name + " are of another dtype");
    return array;
}

// Fills a CandidateBuffer of Python, in place, by a pass without the interpreter's lock; true if all is finite.
template <class T>
bool fill(const py::object &buffer, Of of, const Terms<T> &terms, int64_t length, T threshold, int64_t first) {
    Array<int64_t> indices = array_of<int64_t>(buffer, "indices");
    Array<T> values = array_of<T>(buffer, "values");
    const int64_t count = buffer.attr("count").template cast<int64_t>();
    if (indices.size() != values.size() || indices.size() < SLACK || count < 0)
        throw std::invalid_argument("room: indices and values of one length, SLACK more than its capacity");
    CandidateBuffer<T> room{indices.mutable_data(), values.mutable_data(), count, indices.size() - SLACK};
    bool finite;
    {
        py::gil_scoped_release released;
        finite = best_pass(of, terms, length, threshold, first, room);
    }
    buffer.attr("count") = room.count;
    return finite;
}

template <class T>
bool add_and_collect(const Array<T> &residual, Array<T> &gradient, Array<T> &out, T scale, T threshold, int64_t first,
                     const py::object &buffer, bool stream, bool clear, const std::vector<Array<T>> &before,
                     const std::vector<Array<T>> &after) {
    if (residual.size() != gradient.size() || out.size() != gradient.size())
        throw std::invalid_argument("residual, gradient and sum must have one length");
    T *read = clear ? gradient.mutable_data() : const_cast<T *>(gradient.data());  // not written, if not to be cleared
    std::vector<const T *> summands;
    const auto append = [&](const std::vector<Array<T>> &others) {
        for (const Array<T> &other : others) {
            if (other.size() != gradient.size()) throw std::invalid_argument("all summands must have one length");
            summands.push_back(other.data());
        }
    };
    append(before);
    summands.push_back(read);
    append(after);
    const int64_t count = summands.size();
    const Terms<T> terms{residual.data(), read, out.mutable_data(), scale, stream, clear, summands.data(), count};
    return fill(buffer, count > 1 ? Of::SUMS : Of::SUM, terms, gradient.size(), threshold, first);
}

template <class T>
bool subtract_and_collect(const Array<T> &minuend, const Array<T> &subtrahend, T threshold, int64_t first,
                          const py::object &buffer) {
    if (minuend.size() != subtrahend.size()) throw std::invalid_argument("both arrays must have one length");
    T *unwritten = const_cast<T *>(minuend.data());
    const Terms<T> terms{minuend.data(), const_cast<T *>(subtrahend.data()), unwritten, 1, false, false};
    return fill(buffer, Of::DIFFERENCE, terms, minuend.size(), threshold, first);
}

template <class T> void collect(Array<T> &acc, T threshold, int64_t first, const py::object &buffer) {
    T *data = acc.mutable_data();
    fill(buffer, Of::ARRAY, Terms<T>{data, data, data, 1, false, false}, acc.size(), threshold, first);
}

}  // namespace
