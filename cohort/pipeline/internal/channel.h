#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <vector>

#include "cohort/base/threads/deadline.h"
#include "cohort/pipeline/stage.h"

/// What goes from one stage to its neighbour, and how.
namespace cohort::pipeline {

/// The activations, or the gradients, of one micro-batch. Tensors may be undefined.
struct Message {
  int micro_batch = 0;
  Tensors tensors;
  std::vector<bool> requires_grad;  ///< of each tensor: its gradient is wanted
};

/// One way from a stage to a neighbour. Threads: one sends, one receives, any closes.
class Channel {
 public:
  virtual ~Channel() = default;
  /// Throws: ChannelTimeout, or TimeoutError naming the peer, where there was no room until the deadline;
  /// ChannelClosed.
  virtual void send(Message message, const base::Deadline& deadline) = 0;
  /// Returns the oldest message that was sent. Throws: as send().
  virtual Message receive(const base::Deadline& deadline) = 0;
  /// Waits until all that was sent has gone.
  virtual void flush() {}
  /// Ends what waits on it, with ChannelClosed.
  virtual void close() = 0;
};

/// Another part of the run has failed: nothing of its own to say.
class ChannelClosed {};
/// The deadline of the run has passed: whoever watches the whole run says who was in what.
class ChannelTimeout {};

/// Between two threads: hands over the tensors themselves, at most `capacity` messages at a time.
class ThreadChannel final : public Channel {
 public:
  /// `spin`: how long a side looks for the other before it sleeps; 0 where they share a core.
  ThreadChannel(int capacity, std::chrono::microseconds spin) : capacity_(capacity), spin_(spin) {}
  void send(Message message, const base::Deadline& deadline) override;
  Message receive(const base::Deadline& deadline) override;
  void close() override;

 private:
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, const base::Deadline& deadline, const Ready& ready);

  const int capacity_;
  const std::chrono::microseconds spin_;
  std::atomic<int> size_{0};
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> messages_;  // under mutex_
};

}  // namespace cohort::pipeline
