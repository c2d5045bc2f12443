#include "cohort/comm/internal/cpu_call.h"

namespace cohort::comm {
namespace {

// The parts that belong to tensor `i` of `count`.
std::vector<std::byte*> parts_for_ranks(const Tensors& tensors, std::size_t i, std::size_t count, int size) {
  if (tensors.empty()) return {};
  if (tensors.size() == count) return parts_of(tensors[i], size);
  const auto ranks = static_cast<std::size_t>(size);
  return pointers(std::span(tensors).subspan(i * ranks, ranks));
}

}  // namespace

std::size_t CpuCall::num_collectives() const {
  switch (type) {
    case CallType::kAllReduce:
    case CallType::kReduceScatter:
      return outputs.size();
    case CallType::kAllGather:
      return inputs.size();
    default:
      return 1;
  }
}

std::vector<std::byte*> CpuCall::output_parts(std::size_t i, int size) const {
  return parts_for_ranks(outputs, i, inputs.size(), size);
}

std::vector<std::byte*> CpuCall::input_parts(std::size_t i, int size) const {
  return parts_for_ranks(inputs, i, outputs.size(), size);
}

CpuWork::CpuWork(int rank, c10d::OpType type, Tensors results)
    : Work(rank, type), results_(std::move(results)) {}

CpuWork::FuturePtr CpuWork::make_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

void CpuWork::complete(c10::ivalue::Future& future, const std::exception_ptr& error, const Tensors& results) {
  if (error) {
    future.setError(error);
  } else {
    future.markCompleted(c10::IValue(results));
  }
}

CpuWork::FuturePtr CpuWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (future_ == nullptr) {
    future_ = make_future();
    if (completed_) complete(*future_, exception_, results_);  // it has no callbacks yet
  }
  return future_;
}

void CpuWork::end(std::exception_ptr error) {
  FuturePtr future;
  {
    const std::lock_guard lock(mutex_);
    completed_ = true;
    exception_ = error;
    future = future_;
  }
  cv_.notify_all();
  if (future != nullptr) complete(*future, error, results_);
}

}  // namespace cohort::comm
