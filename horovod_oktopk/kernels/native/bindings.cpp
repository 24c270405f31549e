// The kernels in C++: the module has the functions of NumpyKernels, with the same results, bit for bit.

#include "collect.hpp"
#include "blocks.hpp"
#include "half_precision.hpp"
#include "indices.hpp"
#include "levels.hpp"
#include "runs.hpp"
#include "select.hpp"
#include "sums.hpp"
#include "write.hpp"

namespace {

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

template <class T> void define(py::module_ &module) {
    module.def("add_and_collect", &add_and_collect<T>, py::arg("residual").noconvert(),
               py::arg("gradient").noconvert(), py::arg("out").noconvert(), py::arg("scale"), py::arg("threshold"),
               py::arg("first"), py::arg("buffer"), py::arg("stream"), py::arg("clear"),
               py::arg("before").noconvert() = std::vector<Array<T>>{},
               py::arg("after").noconvert() = std::vector<Array<T>>{});
    module.def("subtract_and_collect", &subtract_and_collect<T>, py::arg("minuend").noconvert(),
               py::arg("subtrahend").noconvert(), py::arg("threshold"), py::arg("first"), py::arg("buffer"));
    module.def("collect", &collect<T>, py::arg("acc").noconvert(), py::arg("threshold"), py::arg("first"),
               py::arg("buffer"));
    module.def("clear", &clear<T>, py::arg("out").noconvert(), py::arg("indices"));
    module.def("add", &add<T>, py::arg("out").noconvert(), py::arg("indices"), py::arg("values"));
    module.def("add_runs", &add_runs<T>, py::arg("out").noconvert(), py::arg("starts").noconvert(),
               py::arg("offsets").noconvert(), py::arg("values").noconvert(), py::arg("first"));
    module.def("subtract_runs", &subtract_runs<T>, py::arg("minuend").noconvert(), py::arg("subtrahend").noconvert(),
               py::arg("starts").noconvert(), py::arg("offsets").noconvert(), py::arg("first"),
               py::arg("out").noconvert());
    module.def("scatter", &scatter<T>, py::arg("out").noconvert(), py::arg("indices"), py::arg("values"),
               py::arg("zero") = false);
    module.def("passing", &passing<T>, py::arg("indices"), py::arg("values"), py::arg("threshold"));
    module.def("to_half", &to_half<T>, py::arg("values"));
    module.def("to_levels", &to_levels<T>, py::arg("values"), py::arg("levels").noconvert());
    module.def("to_blocks", &to_blocks<T>, py::arg("values"), py::arg("levels").noconvert(), py::arg("block"));
    module.def("kth_magnitude", &kth_magnitude<T>, py::arg("values"), py::arg("k"));
    module.def("sum_parts", &sum_parts<T>, py::arg("indices").noconvert(), py::arg("values").noconvert());
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "The kernels in C++.";
    module.attr("name") = "C++";
    module.attr("SLACK") = SLACK;
    module.attr("SAMPLE") = SAMPLE;
    module.def("use_avx512", &use_avx512, py::arg("wanted"));
    define<float>(module);
    define<double>(module);
    module.def("pack_indices", &pack_indices, py::arg("indices").noconvert(), py::arg("start"), py::arg("low_bits"),
               py::arg("low_words"), py::arg("upper_words"));
    module.def("unpack_indices", &unpack_indices, py::arg("words").noconvert(), py::arg("count"), py::arg("start"),
               py::arg("stop"), py::arg("low_bits"), py::arg("low_words"));
    module.def("from_half", &from_half, py::arg("bits"), py::arg("dtype"));
    module.def("from_levels", &from_levels, py::arg("words").noconvert(), py::arg("count"),
               py::arg("levels").noconvert(), py::arg("dtype"));
    module.def("from_blocks", &from_blocks, py::arg("words").noconvert(), py::arg("scales").noconvert(),
               py::arg("count"), py::arg("levels").noconvert(), py::arg("block"), py::arg("dtype"));
    module.def("common_positions", &common_positions, py::arg("mine").noconvert(), py::arg("other").noconvert());
}
