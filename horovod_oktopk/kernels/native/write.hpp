// Writing few elements into a long array.
#pragma once

#include "blocks.hpp"

namespace {

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
    bool within = true, consecutive = true;
    {
        py::gil_scoped_release released;
        for (int64_t i = 0; i < count; ++i) {
            within &= static_cast<uint64_t>(index[i]) < size;
            consecutive &= index[i] == index[0] + i;
        }
        if (within && consecutive)
            for (int64_t i = 0; i < count; ++i) write(data[index[0] + i], i);
        else if (within) write_at(data, index, count, write);
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

}  // namespace
