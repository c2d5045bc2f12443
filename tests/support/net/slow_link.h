#pragma once

#include <ATen/core/jit_type.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "cohort/comm/group.h"

namespace cohort::test {

/// A link between the ranks that takes latency + bytes / bandwidth for each all-reduce, one after the other,
/// without using a core: the numbers come from the backend below, and are held back until their time.
class SlowLink : public c10d::Backend {
 public:
  using Clock = std::chrono::steady_clock;
  struct Cost {
    std::chrono::nanoseconds latency{0};
    double bytes_per_second = 1e9;
  };

  /// Puts the link under all that `group` does from now on.
  static c10::intrusive_ptr<SlowLink> under(const comm::Group& group, Cost cost) {
    return under(group.process_group(), cost);
  }
  static c10::intrusive_ptr<SlowLink> under(const c10::intrusive_ptr<c10d::ProcessGroup>& group, Cost cost) {
    auto link =
        c10::make_intrusive<SlowLink>(group->getDefaultBackend(), group->getRank(), group->getSize(), cost);
    // A kind that no backend of a group is of: one of a kind that is there would not be replaced.
    constexpr auto kFree = c10d::ProcessGroup::BackendType::UCC;
    group->setBackend(c10::DeviceType::CPU, kFree, link);
    group->setDefaultBackend(kFree);
    return link;
  }

  SlowLink(c10::intrusive_ptr<c10d::Backend> below, int rank, int size, Cost cost)
      : Backend(rank, size), below_(std::move(below)), cost_(cost), thread_([this] { run(); }) {}
  ~SlowLink() override {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void set_cost(Cost cost) { cost_ = cost; }
  const std::string getBackendName() const override { return "slow"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    auto work = c10::make_intrusive<HeldWork>(getRank(), below_->allreduce(tensors, options), tensors);
    const auto bytes = static_cast<double>(tensors[0].nbytes());
    {
      const std::lock_guard lock(mutex_);
      free_ = std::max(free_, Clock::now()) + cost_.latency +
              std::chrono::nanoseconds(static_cast<std::int64_t>(bytes / cost_.bytes_per_second * 1e9));
      held_.emplace_back(free_, work);
    }
    changed_.notify_all();
    return work;
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return below_->broadcast(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return below_->_allgather_base(output, input, options);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    return below_->allgather(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return below_->barrier(options);
  }

 private:
  class HeldWork : public c10d::Work {
   public:
    HeldWork(int rank, c10::intrusive_ptr<c10d::Work> below, std::vector<at::Tensor> results)
        : Work(rank, c10d::OpType::ALLREDUCE),
          below_(std::move(below)),
          results_(std::move(results)),
          future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}
    bool isCompleted() override { return future_->completed(); }
    bool wait(std::chrono::milliseconds /*timeout*/) override {
      future_->waitAndThrow();
      return true;
    }
    void synchronize() override {}
    std::vector<at::Tensor> result() override { return results_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
    void release() {
      try {
        below_->wait();
        future_->markCompleted(c10::IValue(results_));
      } catch (...) {
        future_->setError(std::current_exception());
      }
    }

   private:
    const c10::intrusive_ptr<c10d::Work> below_;
    const std::vector<at::Tensor> results_;
    const c10::intrusive_ptr<c10::ivalue::Future> future_;
  };

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopped_ || !held_.empty(); });
      if (held_.empty()) return;
      const auto [when, work] = held_.front();
      held_.pop_front();
      lock.unlock();
      std::this_thread::sleep_until(when);
      work->release();
      lock.lock();
    }
  }

  const c10::intrusive_ptr<c10d::Backend> below_;
  Cost cost_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
  Clock::time_point free_{};
  std::deque<std::pair<Clock::time_point, c10::intrusive_ptr<HeldWork>>> held_;
  std::thread thread_;
};

}  // namespace cohort::test
