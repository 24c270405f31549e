// Elements of a long array in runs of consecutive ones.
#pragma once

#include "blocks.hpp"

namespace {

inline void prefetch_run(const void *from) {
    for (int64_t line = 0; line < 4; ++line) __builtin_prefetch(static_cast<const char *>(from) + 64 * line, 0, 2);
}

// each(where a run begins in an array of this size, how many values come before it, its length), for each run.
template <class Each>
void for_runs(int64_t size, const Array<int64_t> &starts, const Array<int64_t> &offsets, int64_t first, int64_t values,
              Each each) {
    const int64_t *start = starts.data(), *offset = offsets.data(), count = starts.size();
    bool fits = offsets.size() == count + 1 && offset[0] == 0 && offset[count] == values;
    for (int64_t i = 0; fits && i < count; ++i) fits = offset[i] <= offset[i + 1];
    if (!fits) throw std::invalid_argument("the runs must have as many elements as there are values");
    for (int64_t i = 0; fits && i < count; ++i)
        fits = start[i] >= first && start[i] - first <= size - (offset[i + 1] - offset[i]);
    if (!fits) throw std::out_of_range("a run lies outside of the array");
    py::gil_scoped_release released;
    constexpr int64_t AHEAD = 4;  // runs that are fetched while the ones before them are handled
    for (int64_t i = 0; i < count; ++i)
        each(start[i] - first, offset[i], offset[i + 1] - offset[i], start[std::min(i + AHEAD, count - 1)] - first);
}

template <class T>
void add_runs(Array<T> &out, const Array<int64_t> &starts, const Array<int64_t> &offsets, const Array<T> &values,
              int64_t first) {
    T *data = out.mutable_data();
    const T *value = values.data();
    for_runs(out.size(), starts, offsets, first, values.size(), [=](int64_t at, int64_t i, int64_t length, int64_t next) {
        prefetch_run(data + next);
        for (int64_t j = 0; j < length; ++j) data[at + j] += value[i + j];
    });
}

template <class T>
void subtract_runs(const Array<T> &minuend, const Array<T> &subtrahend, const Array<int64_t> &starts,
                   const Array<int64_t> &offsets, int64_t first, Array<T> &out) {
    if (minuend.size() != subtrahend.size()) throw std::invalid_argument("arrays of one length");
    const T *from = minuend.data(), *less = subtrahend.data();
    T *value = out.mutable_data();
    for_runs(minuend.size(), starts, offsets, first, out.size(),
             [=](int64_t at, int64_t i, int64_t length, int64_t next) {
        prefetch_run(from + next);
        prefetch_run(less + next);
        for (int64_t j = 0; j < length; ++j) value[i + j] = from[at + j] - less[at + j];
    });
}

}  // namespace
