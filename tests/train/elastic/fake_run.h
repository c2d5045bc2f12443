#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cohort/elastic/session.h"

/// An elastic run without agents and sockets: processes are threads of a test, which end, die and come as the
/// test says.
namespace cohort::test {

/// What a process of a fake run throws where it dies.
struct FakeDeath : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class FakeFault : std::uint8_t {
  kNone,
  kDie,     ///< the process dies, and a new one takes its place
  kVanish,  ///< the process dies, and none takes its place unless it was the last
  kEnd,     ///< the generation ends, and all processes live
  kJoin,    ///< another process comes, which enters between two steps
};

/// Decides what happens to a process at its n-th point: wherever a session or a transfer is called.
using FakeFaults = std::function<FakeFault(int process_id, int point)>;

/// The run. Threads: any.
class FakeRun {
 public:
  /// `body` is a process: what it does with its session.
  using Body = std::function<void(int process_id, std::shared_ptr<elastic::Session> session)>;

  FakeRun(int virtual_ranks, FakeFaults faults, Body body);
  ~FakeRun();
  FakeRun(const FakeRun&) = delete;
  FakeRun& operator=(const FakeRun&) = delete;

  /// Starts `count` processes, and returns when all that live have ended. Throws: what a process threw but
  /// for its death.
  void run(int count);
  /// The points that a process has come to; all generations; deaths.
  int points(int process_id) const;
  std::uint64_t generations() const;
  int deaths() const;

 private:
  friend class FakeSession;
  friend class FakeExchange;

  struct Process;
  struct Round;
  struct Place;

  void start();
  void reach_point(int id, bool may_end);
  void end_generation();
  void form_generation();
  bool all_wait() const;
  bool has_joiner() const;
  void check_may_wait(int id) const;
  void note_death(int id);
  void wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready, const std::string& what);

  const std::string origin_;
  const int virtual_ranks_;
  const FakeFaults faults_;
  const Body body_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<std::thread> threads_;
  std::shared_ptr<Round> round_;  // of the newest generation
  std::uint64_t generation_ = 0;
  int deaths_ = 0, running_ = 0;
  int stop_signal_ = 0;
  bool has_ended_ = false;
  std::exception_ptr error_;
};

}  // namespace cohort::test
