#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

/// What a step takes in memory at any batch size, from what it took with a few samples.
namespace cohort::memory {

/// One sample alone is none to batch norm.
constexpr std::int64_t kProbeSamples = 2;

/// Bytes as a function of the samples in a batch: a straight line through what two batches took.
struct MemoryLine {
  double fixed = 0;
  double per_sample = 0;
  std::int64_t at(std::int64_t samples) const;
};

/// What one forward and backward hold besides the model and the batch.
struct StepMemory {
  /// What the forward keeps for backward, by leaf layer ("layer1.0.conv1"), in the order of its run; the last
  /// one, without a name, is what came after the last layer, such as the loss. A model that does not report
  /// its layers (models/observer.h) has this one only, a placement of a pipeline none.
  std::vector<std::pair<std::string, MemoryLine>> layers;
  /// What there was besides parameters' gradients after the forward; after each one of a pipeline's
  /// placement.
  std::vector<MemoryLine> held;
  /// Live bytes after each block that was given out or taken back: forward, then backward.
  std::vector<MemoryLine> curve;

  /// The most that was held.
  std::int64_t activations(std::int64_t samples) const;
  /// The most at any time, the gradients made by then included.
  std::int64_t peak(std::int64_t samples) const;
};

/// A part of a step.
struct ProbedPart {
  std::string name;
  std::int64_t held = 0;                 ///< at its end
  std::vector<std::int64_t> curve = {};  ///< within it
};
using Probe = std::vector<ProbedPart>;

/// Draws lines through what probes of two batches took.
class LinearFit {
 public:
  LinearFit(std::int64_t samples_of_few, std::int64_t samples_of_more)
      : few_(samples_of_few), more_(samples_of_more) {}

  MemoryLine through(std::int64_t few, std::int64_t more) const;
  /// Adds a line for each moment; one through both peaks where the parts have other moments.
  void add_curve(std::vector<MemoryLine>& lines, const ProbedPart& few, const ProbedPart& more) const;

 private:
  std::int64_t few_, more_;
};

/// The same step with few samples, and with more of them.
struct ProbePair {
  std::int64_t samples_of_few, samples_of_more;
  Probe few, more;

  LinearFit lines() const { return {samples_of_few, samples_of_more}; }
};

/// Returns probes of two steps with 2 and 4 samples in each forward; with 4 and 8 where 2 samples took other
/// kernels than 4 (see the source, Note [Two probes of the same kernels]). `samples_of(n)`: samples of the
/// step where a forward has n; null: n.
ProbePair probe_twice(const std::function<Probe(std::int64_t samples)>& probe,
                      const std::function<std::int64_t(std::int64_t each)>& samples_of = nullptr);

}  // namespace cohort::memory
