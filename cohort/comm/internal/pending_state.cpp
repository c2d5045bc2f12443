// A call begins on its caller's thread, unless it is compared first or other calls wait before it. Then it
// begins on the group's thread, with the caller's thread-local state and stream. So the backend gets a rank's
// calls in their order. Once c10d's group was handed out, all calls begin on their callers' threads. A view
// that the backend cannot take goes as a copy, and is copied back. Always: before finish() throws, it ends
// the work on the CPU and waits for that, since the tensors are the caller's again. Where the backend
// continues all the same, a warning says so.
#include "cohort/comm/internal/pending_state.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/threads/wait.h"
#include "cohort/base/timeline.h"
#include "cohort/comm/internal/consistency_check.h"
#include "cohort/comm/internal/deadline_store.h"
#include "cohort/comm/internal/error_cause.h"
#include "cohort/comm/internal/pipe_signal.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kReportTime(150);           // for the group's thread, to say what came of a call
constexpr milliseconds kLocalTime(100);            // for Gloo to end what it does without its connections,
constexpr std::int64_t kLocalBytesPerMs(500'000);  // and to copy or add this many
constexpr const char* kWaitedTooLong =
    "timed out while it waited for earlier calls that not all ranks have made";

std::string shapes(std::span<const at::Tensor> tensors) {
  base::TextList list;
  for (std::size_t i = 0; i < tensors.size() && i < 3; ++i) list.add(shape_text(tensors[i]));
  return list.text() + (tensors.size() > 3 ? base::concat(" and ", tensors.size() - 3, " more") : "");
}

// "from rank 1, ": the root, or the other end of a message.
std::string peer_text(const Signature& signature) {
  return signature.direction == nullptr ? ""
                                        : base::concat(signature.direction, " rank ", signature.peer, ", ");
}

// That of the caller on the GPU where the tensors are: the backend orders the call after it.
std::optional<c10::Stream> stream_of(std::span<const at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cuda()) continue;
    return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(tensor.device());
  }
  return std::nullopt;
}

}  // namespace

void reject(const std::string& what, const std::string& hint) {
  throw UsageError("comm.group", what, hint);
}

PendingState::PendingState(std::shared_ptr<GroupState> of, const char* call, milliseconds timeout)
    : group(std::move(of)),
      under_way(group->calls_under_way),
      deadline(timeout.count() == 0 ? group->timeout : timeout),
      is_groups_deadline(timeout.count() == 0 || group->shares_time) {
  signature.call = call;
  if (timeout.count() < 0) reject(base::concat(call, ": timeout is ", timeout.count(), " ms"));
  group->check_usable();
  if (is_groups_deadline && group->owner != nullptr) own_time.emplace(*group, deadline);
  if (base::Timeline::enabled()) row = group->take_row();
}

PendingState::~PendingState() {
  if (row >= 0) group->give_row(row);
}

at::Tensor PendingState::in(const at::Tensor& tensor) {
  group->check_carries(tensor.device());
  in_bytes += static_cast<std::int64_t>(tensor.nbytes());
  tensors.push_back(tensor._is_zerotensor() ? at::zeros(tensor.sizes(), tensor.options())
                                            : tensor.resolve_conj().resolve_neg().contiguous());
  return tensors.back();
}

at::Tensor PendingState::out(const at::Tensor& tensor, bool reads) {
  group->check_carries(tensor.device());
  if (tensor.requires_grad() && tensor.is_leaf() && at::GradMode::is_enabled()) {
    reject(base::concat(signature.call, ": a tensor that requires grad would be changed in place"),
           "at::NoGradGuard, or detach()");
  }
  if (tensor._is_zerotensor()) {
    reject(base::concat(signature.call, ": zeros without memory cannot be written to"), "their clone()");
  }
  out_bytes += static_cast<std::int64_t>(tensor.nbytes());
  // LibTorch would resolve what is lazily conjugate or negative on its way to the backend, into a copy.
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    tensors.push_back(tensor);
    return tensor;
  }
  at::Tensor copy =
      reads ? tensor.resolve_conj().resolve_neg().contiguous() : at::empty(tensor.sizes(), tensor.options());
  tensors.push_back(copy);
  returns.emplace_back(tensor, copy);
  return copy;
}

milliseconds PendingState::left() const {
  return milliseconds(std::max(1, deadline.remaining_ms()));
}

std::string PendingState::describe() const {
  return base::concat(signature.call, " ", signature.number, " of group '", group->name, "' (rank ",
                      group->rank, "/", group->size, ", ", shapes(tensors), ", ", peer_text(signature),
                      std::chrono::duration_cast<milliseconds>(deadline.elapsed()).count(), " ms)");
}

void PendingState::fail(const std::exception& error, base::Deadline until) {
  const std::string what = describe(), words = base::message_of(error);
  group->flight.set(ticket, CallState::kFailed);
  // A backend rejects a type it has no code for when it runs, on every rank, before anything travels.
  if (dynamic_cast<const Error*>(&error) == nullptr && cause_of(error) == ErrorCause::kUsage) {
    throw UsageError("comm.group", base::concat(what, ": ", words));
  }
  group->fail(error, what, until, is_groups_deadline ? std::optional(deadline) : std::nullopt);
}

void PendingState::begin(const CallDetails& details, const Body& body) {
  signature = Signature(signature.call, details);
  signature.number = group->calls.fetch_add(1);
  ticket = group->flight.begin(signature, group->positions.fetch_add(1));
  std::optional<Fingerprint> fingerprint;
  if (group->checks(signature.number)) fingerprint = make_fingerprint(*group, signature, details);
  if (group->is_shared_with_c10d() || (!fingerprint && group->is_queue_empty())) {
    if (fingerprint) {
      const auto since = FlightEntry::Clock::now();
      const OwnerWait waiting(group->owner.get());
      compare(*fingerprint);
      held += FlightEntry::Clock::now() - since;
    }
    return hand_over_collective(body);
  }
  // It does not own the call: one that nobody waits for any more is not begun.
  beginning = group->enqueue([call = weak_from_this(), fingerprint, body, of_caller = at::ThreadLocalState(),
                              stream = stream_of(tensors)] {
    const std::shared_ptr<PendingState> self = call.lock();
    if (self == nullptr) return;
    const at::ThreadLocalStateGuard as_caller(of_caller);
    const c10::OptionalStreamGuard on_stream(stream);
    self->begin_from_queue(fingerprint, body);
  });
}

// Note [Giving up]: the group's thread and the one who waits both may end a call's time in the queue. One
// exchange decides which does: what was given up is never handed over, since its tensors are the caller's
// again; what was handed over is waited for.
void PendingState::begin_from_queue(const std::optional<Fingerprint>& fingerprint, const Body& body) {
  has_left_queue = true;
  group->check_usable();
  if (fingerprint) compare(*fingerprint);
  if (deadline.expired()) fail(std::runtime_error(kWaitedTooLong));
  if (step_on(Step::kHandedOver)) return hand_over_collective(body);
  // The other ranks begin it, so what comes after it would meet theirs.
  group->mark_broken(base::concat(describe(), ": ", kWaitedTooLong), group->end_of_failure(deadline));
}

void PendingState::compare(const Fingerprint& fingerprint) {
  group->flight.set(ticket, CallState::kWaiting);
  std::vector<Fingerprint> all;
  try {
    all = gather_fingerprints(*group, fingerprint, deadline);
    group->flight.set(ticket, CallState::kBegun);
  } catch (const std::exception& error) {
    fail(error);
  }
  try {
    compare_calls(*group, all);
  } catch (const UsageError&) {  // nothing has travelled
    group->flight.set(ticket, CallState::kFailed);
    throw;
  }
}

void PendingState::wait_until_begun() {
  // A call that has left the queue ends by itself, and says more than that it is late.
  const base::Deadline until = deadline.later(kLateTime);
  const auto has_begun = [&] {
    return beginning.wait(deadline.later(kReportTime)) || (has_left_queue && beginning.wait(until));
  };
  if (beginning.valid()) {
    const bool is_late = !has_begun() && (cancel() || !beginning.wait(until));
    if (is_late && beginning.abandon()) fail(std::runtime_error(kWaitedTooLong));
    beginning.get(until);  // it is done, maybe since the last wait for it
  }
  if (step_.load() == Step::kCancelled) fail(std::runtime_error(kWaitedTooLong));  // so there is no work
}

void PendingState::begin_message(const CallDetails& details, const Body& body) {
  signature = Signature(signature.call, details);
  signature.number = group->messages.fetch_add(1);
  ticket = group->flight.begin(signature, -1);
  std::optional<BlockedPipeSignal> errors_not_signals;
  if (!is_on_gpu() && group->may_raise_sigpipe) errors_not_signals.emplace();
  hand_over(body);
}

// send and recv do not come here: for these NCCL creates a separate communicator of the two ranks.
void PendingState::hand_over_collective(const Body& body) {
  hand_over(body);
  if (is_on_gpu()) group->has_begun_on_gpu = true;
}

void PendingState::hand_over(const Body& body) {
  const at::NoGradGuard no_grad;
  try {
    work = body(left());
  } catch (const c10::DistError& error) {  // no connection, a store that is gone, an abort
    fail(error);
  } catch (const c10::Error& error) {
    // It was rejected before anything travelled: a type or an operation that the backend does not know.
    group->flight.set(ticket, CallState::kFailed);
    throw UsageError("comm.group", base::concat(describe(), ": ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    fail(error);
  }
}

bool PendingState::is_on_gpu() const {
  return std::ranges::any_of(tensors, [](const at::Tensor& tensor) { return tensor.is_cuda(); });
}

// What continues after an error would write to tensors that the caller has got back. A message has no time of
// its own in c10d.
void PendingState::end_work(c10d::Work& running, const std::exception& error, base::Deadline until) {
  if (is_on_gpu() || running.isCompleted()) return;
  // First, as the store is asked until then, and what follows may take longer.
  group->mark_broken(describe(), error, until);
  try {
    running.abort();
  } catch (const std::exception&) {  // it cannot
  }
  // Without its connections it moves numbers within this process alone: that may take its time.
  const milliseconds local = kLocalTime + milliseconds(std::max(in_bytes, out_bytes) / kLocalBytesPerMs);
  if (group->end_calls(cause_of(error))) until = until.later(local);
  if (base::poll_until([&] { return running.isCompleted(); }, until)) return;
  base::log_warning(
      base::concat("[comm.group] ", describe(),
                   " continues in the backend after its deadline, and may write to its tensors"));
}

void PendingState::finish() {
  const auto since = FlightEntry::Clock::now();
  const OwnerWait waiting(group->owner.get());
  wait_until_begun();
  const WorkPtr running = work;
  group->flight.set(ticket, CallState::kWaiting);
  try {
    // NCCL's wait orders the stream, as promised, only without a time: with one it blocks until the GPU is
    // done. A collective that does not end is then its watchdog's matter.
    if (!(is_on_gpu() ? running->wait() : running->wait(left()))) throw std::runtime_error("it was aborted");
  } catch (const std::exception& error) {
    const base::Deadline until = group->end_of_failure(deadline);
    end_work(*running, error, until);
    fail(error, until);
  }
  const at::NoGradGuard no_grad;
  for (auto& [view, copy] : returns) view.copy_(copy);
  returns.clear();
  held += FlightEntry::Clock::now() - since;
  own_time.reset();
  group->flight.set(ticket, CallState::kDone);
  count();
}

// What goes in and comes out is counted once; on the timeline the calls of a group have rows of their own,
// since they continue while the caller does something else.
void PendingState::count() {
  const std::int64_t bytes = std::max(in_bytes, out_bytes);
  group->count(signature.call, {.calls = 1, .bytes = bytes, .waiting = held, .total = deadline.elapsed()});
  if (row < 0) return;
  const auto begin = base::Timeline::Clock::now() - deadline.elapsed();
  base::Timeline::complete(signature.call, begin,
                           {.track = base::Timeline::track(group->row_name(row)),
                            .key = "bytes",
                            .value = static_cast<double>(bytes)});
}

}  // namespace cohort::comm
