#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "simulated_run.h"

namespace cohort::test {

inline constexpr int kElements = 4;  // of a sum

inline std::string bytes_of(const std::vector<std::uint64_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::uint64_t)};
}
inline std::vector<std::uint64_t> numbers_of(const std::string& bytes) {
  std::vector<std::uint64_t> numbers(bytes.size() / sizeof(std::uint64_t));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}
inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  a = (a ^ (b + 0x9E3779B97F4A7C15ULL + (a << 6) + (a >> 2))) * 0xBF58476D1CE4E5B9ULL;
  return a ^ (a >> 31);
}

struct SimulatedRun::Agent {
  int host = 0;
  std::string incarnation, address;
  std::optional<membership::MemberProtocol> protocol;
  membership::Report report;
  std::vector<std::unique_ptr<Process>> processes;
  bool is_alive = true, has_stopped = false;
  bool is_host_lost = false;
  SimTime endpoint_heard;
  SimTime armed = SimTime::max();
  std::uint64_t last_generation = 0;
  std::uint64_t known_steps = 0;  ///< committed by its processes, also by those that died
};

/// A rank: the protocol of steps, over sums of numbers in place of gradients.
class SimulatedRun::Process : public membership::StepHost {
 public:
  Process(SimulatedRun& run, std::weak_ptr<Agent> agent, std::size_t index, std::uint64_t committed,
          std::uint64_t state, std::string sums)
      : steps(*this, committed),
        run_(run),
        agent_(std::move(agent)),
        index_(index),
        state_(state),
        sums_(std::move(sums)) {}

  membership::StepProtocol steps;
  std::uint64_t not_before = 0;  ///< the generation in which it was started: it enters a later one
  std::uint64_t recovered = 0;   ///< the generation in which it has begun a step
  std::vector<membership::MemberId> lost_links;  ///< of the generation that it is in
  bool is_finished = false, is_alive = true;
  SimTime stopped_until;
  std::uint64_t value() const { return state_; }
  const std::string& last_sums() const { return sums_; }

  void send(int process, membership::StepMessage message) override;
  std::string state() override { return bytes_of({state_}) + sums_; }
  void copy_state(const std::string& state, std::uint64_t steps) override;
  bool compute(std::uint64_t step) override;
  std::string cover(std::uint64_t step, int slice) override;
  std::string add(std::uint64_t step, const std::vector<std::string>& covers) override;
  void apply(std::uint64_t step, const std::vector<std::string>& sums) override;
  void on_entered(const membership::Generation& generation) override;
  void on_left() override;
  void on_state_lost() override;

 private:
  SimulatedRun& run_;
  const std::weak_ptr<Agent> agent_;
  const std::size_t index_;
  std::uint64_t state_;
  std::string sums_;  // of the last step
  membership::Generation generation_;
  int number_ = 0;  // in the generation
  std::uint64_t computing_ = 0;
};

}  // namespace cohort::test
