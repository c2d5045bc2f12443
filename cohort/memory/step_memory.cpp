// The live bytes after every allocation of a step are recorded for two small batches. A line is drawn through
// each moment's two values, and the peak at any size is the highest line there. A line through the two peaks
// would not do: at another size another moment may have the peak.
#include "cohort/memory/step_memory.h"

#include <algorithm>
#include <cmath>

namespace cohort::memory {
namespace {

std::int64_t most_of(const std::vector<std::int64_t>& curve) {
  return curve.empty() ? 0 : *std::max_element(curve.begin(), curve.end());
}

std::int64_t most_at(const std::vector<MemoryLine>& lines, std::int64_t samples) {
  std::int64_t most = 0;
  for (const MemoryLine& line : lines) most = std::max(most, line.at(samples));
  return most;
}

// Whether every part of `first` allocates as often as that of `second`: the same kernels, on more samples.
bool are_alike(const Probe& first, const Probe& second) {
  return std::equal(
      first.begin(), first.end(), second.begin(), second.end(),
      [](const ProbedPart& a, const ProbedPart& b) { return a.curve.size() == b.curve.size(); });
}

}  // namespace

std::int64_t MemoryLine::at(std::int64_t samples) const {
  return std::llround(fixed + per_sample * double(samples));
}

std::int64_t StepMemory::activations(std::int64_t samples) const {
  return most_at(held, samples);
}

std::int64_t StepMemory::peak(std::int64_t samples) const {
  return most_at(curve, samples);
}

MemoryLine LinearFit::through(std::int64_t few, std::int64_t more) const {
  const double per_sample = double(more - few) / double(more_ - few_);
  return {double(few) - double(few_) * per_sample, per_sample};
}

void LinearFit::add_curve(std::vector<MemoryLine>& lines, const ProbedPart& few,
                          const ProbedPart& more) const {
  if (few.curve.empty() || more.curve.empty()) return;
  if (few.curve.size() != more.curve.size()) {
    lines.push_back(through(most_of(few.curve), most_of(more.curve)));
    return;
  }
  for (std::size_t i = 0; i < few.curve.size(); ++i) {
    lines.push_back(through(few.curve[i], more.curve[i]));
  }
}

// Note [Two probes of the same kernels]
// Between two probes whose blocks are the same ones each block grows along its own line, so that whichever
// moment of the step has the peak at the size that is planned, its line is there. LibTorch takes other
// kernels for the smallest batches (oneDNN: a convolution's backward in bf16, 2 samples or 4); then the probe
// of more is the smaller one of the next two.
ProbePair probe_twice(const std::function<Probe(std::int64_t)>& probe,
                      const std::function<std::int64_t(std::int64_t)>& samples_of) {
  const auto samples = [&](std::int64_t each) { return samples_of ? samples_of(each) : each; };
  const std::int64_t few = samples(kProbeSamples), more = samples(2 * kProbeSamples),
                     most = samples(4 * kProbeSamples);
  ProbePair probes{few, more, probe(few), probe(more)};
  if (are_alike(probes.few, probes.more)) return probes;
  return {more, most, std::move(probes.more), probe(most)};
}

}  // namespace cohort::memory
