#pragma once

#include <ATen/ops/ones.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cohort/comm/group.h"

namespace cohort::test {

/// What LibTorch's profiler sees of the calls whose names begin with a prefix, until finish() or the end of
/// this object. One at a time.
class ProfiledCalls {
 public:
  struct CallCount {
    int begun = 0, ended = 0;
    std::int64_t bytes = 0;  // of the last one
    std::string group;
  };

  explicit ProfiledCalls(std::string prefix) {
    seen().prefix = std::move(prefix);
    finish();  // what ended after finish() of an object before
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&begin, &end).needsInputs(true).scopes({at::RecordScope::USER_SCOPE}));
  }
  ~ProfiledCalls() { finish(); }
  ProfiledCalls(const ProfiledCalls&) = delete;
  ProfiledCalls& operator=(const ProfiledCalls&) = delete;

  std::map<std::string, CallCount> finish() {
    if (handle_ != at::INVALID_CALLBACK_HANDLE) at::removeCallback(handle_);
    handle_ = at::INVALID_CALLBACK_HANDLE;
    const std::lock_guard lock(seen().mutex);
    return std::exchange(seen().calls, {});
  }

 private:
  // LibTorch takes functions without a state of their own.
  struct Seen {
    std::string prefix;
    std::mutex mutex;
    std::map<std::string, CallCount> calls;  // under the mutex
  };
  static Seen& seen() {
    static Seen all;
    return all;
  }
  struct Observed : at::ObserverContext {
    std::string name;
  };
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& record) {
    const std::string name = record.name();
    if (!name.starts_with(seen().prefix)) return nullptr;
    const std::lock_guard lock(seen().mutex);
    CallCount& call = seen().calls[name];
    ++call.begun;
    const auto inputs = record.inputs();
    call.bytes = inputs[inputs.size() - 2].toInt();
    call.group = inputs.back().toStringRef();
    auto context = std::make_unique<Observed>();
    context->name = name;
    return context;
  }
  static void end(const at::RecordFunction& /*record*/, at::ObserverContext* context) {
    if (context == nullptr) return;
    const std::lock_guard lock(seen().mutex);
    ++seen().calls[static_cast<Observed*>(context)->name].ended;
  }

  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

/// A call of each kind between two ranks.
inline void make_calls_of_each_kind(comm::Group& group) {
  at::Tensor t = at::ones({100}), both = at::ones({200});
  group.all_reduce(t).wait();
  group.broadcast(t, 1).wait();
  group.all_gather(both, t).wait();
  group.reduce_scatter(t, both).wait();
  if (group.rank() == 0) {
    group.send(t, 1).wait();
  } else {
    group.recv(t, 0).wait();
  }
}

}  // namespace cohort::test
