// A step begins requests that do not block; has_arrived() tests them, and advance() begins the next step
// where they are done. Always: a call ends once, with its results or with an error. After an error the
// tensors stay with the call, since MPI may still read and write them.
#include "cohort/comm/backends/mpi/internal/work.h"

#include <algorithm>
#include <array>

#include "cohort/base/error.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"

namespace cohort::comm::mpi {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kEndTime(300);  // for the engine to end a call, unless MPI does not come back to it

milliseconds time_left(base::Deadline deadline) {
  return milliseconds(deadline.remaining_ms());
}

std::string text_of(const at::Tensor& tensor) {
  return base::concat(tensor.dtype().name(), tensor.sizes());
}

}  // namespace

void check(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING + 1> words{};
  int size = 0;
  MPI_Error_string(code, words.data(), &size);
  throw std::runtime_error(base::concat(function, " failed: ", words.data()));
}

std::byte* OrderedQueue::scratch(std::size_t size) {
  if (size > bytes) {
    memory.reset();
    memory.reset(new std::byte[size]);
    bytes = size;
  }
  return memory.get();
}

MpiWork::MpiWork(CpuCall call, CallGroup group, std::vector<Step> steps, std::shared_ptr<OrderedQueue> queue)
    : CpuWork(group.rank, call.op_type, call.outputs),
      call_(std::move(call)),
      group_(std::move(group)),
      steps_(std::move(steps)),
      deadline_(call_.timeout),
      queue_(std::move(queue)) {}

bool MpiWork::wait(milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return completed_; };
  if (timeout == kNoTimeout) timeout = time_left(deadline_);
  if (!base::wait(cv_, lock, over, base::Deadline(timeout))) {
    is_cut_short_ = true;
    if (!base::wait(cv_, lock, over, base::Deadline(kEndTime))) {
      throw std::runtime_error(base::concat(describe(), " timed out, and MPI does not come back"));
    }
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

std::string MpiWork::describe() const {
  const Tensors& tensors = results_.empty() ? call_.inputs : results_;
  base::TextList shapes;
  shapes.add("rank ", group_.rank, "/", group_.size);
  for (std::size_t i = 0; i < std::min<std::size_t>(tensors.size(), 3); ++i) shapes.add(text_of(tensors[i]));
  const std::string more = tensors.size() > 3 ? base::concat(" and ", tensors.size() - 3, " more") : "";
  return base::concat(name_of(call_.type), ", call ", call_.number, " of group '", group_.name, "' (",
                      shapes.text(), more, ")");
}

// Returns whether all requests of the step are done. A message of another size than expected is an error:
// MPI reports only one that is too long.
bool MpiWork::has_arrived() {
  std::vector<MPI_Request>& requests = pending_.requests;
  statuses_.resize(requests.size());
  int done = 0;
  const int code = MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, statuses_.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (const MPI_Status& status : statuses_) {
      if (status.MPI_ERROR != MPI_ERR_PENDING) check(status.MPI_ERROR, name_of(call_.type));
    }
  }
  check(code, name_of(call_.type));
  if (done == 0) return false;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (pending_.expected[i] < 0) continue;
    int bytes = 0;
    MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes);
    source_ = statuses_[i].MPI_SOURCE;
    if (bytes == pending_.expected[i]) continue;
    throw std::runtime_error(base::concat(describe(), ": got ", bytes, " bytes from rank ", source_.load(),
                                          ", expected ", pending_.expected[i]));
  }
  return true;
}

// Steps without requests, such as additions, run one after the other without a return to the loop.
bool MpiWork::advance() {
  while (pending_.requests.empty() || has_arrived()) {
    pending_ = {};
    if (next_ == steps_.size()) return true;
    steps_[next_++](pending_);
  }
  return false;
}

void MpiWork::end(std::exception_ptr error) {
  call_.profiled.reset();
  if (!error) {
    steps_.clear();
    Tensors inputs;
    const std::lock_guard lock(mutex_);  // describe() reads them in wait()
    inputs.swap(call_.inputs);
  }
  CpuWork::end(error);
}

}  // namespace cohort::comm::mpi
