// Python's module: torch.distributed calls create() for the backend "shm". cohort_shm.py compiles it.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>

#include "cohort/comm/backends/shm/shm.h"

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)  // as torch's own module holds c10d's objects

PYBIND11_MODULE(cohort_shm_module, module) {
  // Waits for the other ranks, so Python's lock is released.
  module.def("create", &cohort::comm::make_shm_backend, pybind11::call_guard<pybind11::gil_scoped_release>());
}
