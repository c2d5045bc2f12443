// A reduction advances in steps: each waits for the collective that was begun, and may begin the next.
// Without compression it is an all-reduce in place; with it a rounded copy travels, and is copied back. A
// hook of c10d expects this rank's own gradient and gives the mean, so the buffer's division by the ranks is
// undone first. Its future is waited for a little longer than its deadline, so that the error of a collective
// inside comes first.
#include "cohort/parallel/comm_hook.h"

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "cohort/base/error.h"
#include "cohort/base/threads/deadline.h"
#include "cohort/base/threads/future.h"
#include "cohort/comm/failed_call.h"

namespace cohort::parallel {
namespace {

// Sums `travels`, which is the buffer, or what it was rounded to.
class Sum : public Reduction {
 public:
  Sum(const comm::Group& group, at::Tensor buffer, at::Tensor travels, std::chrono::milliseconds timeout)
      : buffer_(std::move(buffer)), travels_(std::move(travels)) {
    pending_ = group.all_reduce(travels_, comm::ReduceOp::SUM, {timeout});
  }
  bool advance() override {
    pending_.wait();
    if (!travels_.is_same(buffer_)) buffer_.copy_(travels_);
    return false;
  }

 private:
  at::Tensor buffer_, travels_;
  comm::Pending pending_;
};

CommHook compress_hook(at::ScalarType type) {
  return [type](const HookBucket& bucket) {
    const at::Tensor& buffer = bucket.bucket.getBuffer();
    return std::make_unique<Sum>(bucket.group, buffer, buffer.to(type), bucket.timeout);
  };
}

constexpr std::chrono::milliseconds kErrorTime(150);  // for the error of a collective of the hook's

// The future has the deadline of the collective in it; this one is for a hook that never completes it.
class Awaited : public Reduction {
 public:
  Awaited(const HookBucket& bucket, c10::intrusive_ptr<c10::ivalue::Future> future)
      : group_(bucket.group),
        buffer_(bucket.bucket.getBuffer()),
        future_(std::move(future)),
        deadline_(bucket.timeout.count() > 0 ? bucket.timeout : bucket.group.timeout()) {}
  bool advance() override {
    if (!is_complete_by(deadline_.later(kErrorTime))) {
      fail(TimeoutError("parallel.reduce", "it did not complete the future of a bucket"));
    }
    at::Tensor result;
    try {
      result = c10d::detail::parseCppCommHookResult(future_->value());
    } catch (const std::exception& error) {
      if (!comm::is_of_backend(error)) throw;
      fail(error);
    }
    if (result.numel() != buffer_.numel()) {
      throw UsageError("parallel.reduce", base::concat("a communication hook returned ", result.numel(),
                                                       " numbers for a bucket of ", buffer_.numel()));
    }
    // A hook may have reduced in place.
    if (result.data_ptr() != buffer_.data_ptr()) buffer_.copy_(result.view(buffer_.sizes()));
    return false;
  }

 private:
  bool is_complete_by(base::Deadline deadline) {
    // The callback has the promise: the future may complete after this call has given up.
    const auto promise = std::make_shared<base::Promise<void>>("the future of a communication hook");
    const base::Future<void> complete = promise->future();
    future_->addCallback([promise](c10::ivalue::Future&) { promise->set(); });
    return complete.wait(deadline);
  }
  [[noreturn]] void fail(const std::exception& error) const {
    comm::fail_call(group_, error, base::concat("a communication hook, for ", buffer_.numel(), " numbers"),
                    deadline_, [this] { return future_->completed(); });
  }

  const comm::Group group_;
  at::Tensor buffer_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  base::Deadline deadline_;
};

base::Registry<CommHookFactory>& hook_registry() {
  static auto* instance = new base::Registry<CommHookFactory>(
      "communication hook", "parallel.comm_hook",
      {{"none", [] { return CommHook(); }}, {"fp16", fp16_compress_hook}, {"bf16", bf16_compress_hook}});
  return *instance;
}

}  // namespace

std::unique_ptr<Reduction> all_reduce(const comm::Group& group, const at::Tensor& flat,
                                      std::chrono::milliseconds timeout) {
  return std::make_unique<Sum>(group, flat, flat, timeout);
}

CommHook all_reduce_hook() {
  return [](const HookBucket& bucket) {
    return all_reduce(bucket.group, bucket.bucket.getBuffer(), bucket.timeout);
  };
}

CommHook fp16_compress_hook() {
  return compress_hook(at::kHalf);
}

CommHook bf16_compress_hook() {
  return compress_hook(at::kBFloat16);
}

CommHook future_hook(FutureHook hook) {
  return [hook = std::move(hook)](const HookBucket& bucket) {
    bucket.bucket.getBufferRef().mul_(bucket.group.size());
    auto future = hook(bucket.bucket);
    if (!future) throw UsageError("parallel.reduce", "a communication hook returned no future");
    return std::make_unique<Awaited>(bucket, std::move(future));
  };
}

namespace {

// Registration while a library loads cannot throw, so an empty factory is found on its first use.
CommHookFactory find_factory(const std::string& name) {
  CommHookFactory factory = hook_registry().get(name);
  if (!factory) {
    throw UsageError("parallel.comm_hook",
                     base::concat("communication hook '", name, "' was registered without a factory"));
  }
  return factory;
}

}  // namespace

void check_comm_hook_name(const std::string& name) {
  find_factory(name);
}

CommHook make_comm_hook(const std::string& name) {
  return find_factory(name)();
}

void register_comm_hook(const std::string& name, CommHookFactory factory) {
  if (!factory) throw UsageError("parallel.comm_hook", "a communication hook needs a factory");
  hook_registry().add(name, std::move(factory), "register_comm_hook");
}

bool register_comm_hook_at_load(const char* name, CommHookFactory factory, const char* file,
                                int line) noexcept {
  return hook_registry().add_at_load(name, std::move(factory), file, line);
}

}  // namespace cohort::parallel
