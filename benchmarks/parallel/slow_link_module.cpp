// PyTorch's way to the link of parallel_overlap: ddp.py compiles it.
#include <pybind11/pybind11.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tests/support/net/slow_link.h"

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)  // as torch's own module holds c10d's objects

namespace py = pybind11;
using cohort::test::SlowLink;

PYBIND11_MODULE(slow_link_module, module) {
  static const auto cost = [](double latency_s, double bytes_per_second) {
    return SlowLink::Cost{.latency = std::chrono::nanoseconds(static_cast<std::int64_t>(latency_s * 1e9)),
                          .bytes_per_second = bytes_per_second};
  };
  static c10::intrusive_ptr<SlowLink> link;  // of the one group that ddp.py has
  module.def("put_under", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, double latency_s,
                             double bytes_per_second) {
    link = SlowLink::under(group, cost(latency_s, bytes_per_second));
  });
  module.def("set_cost", [](double latency_s, double bytes_per_second) {
    link->set_cost(cost(latency_s, bytes_per_second));
  });
}
