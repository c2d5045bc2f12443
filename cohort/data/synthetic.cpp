// A sample is the pattern of its class plus noise. Patterns are drawn once, from the seed; label and noise
// follow from seed and index. So nothing is stored for a sample, and reading one in any order, on any thread,
// gives the same bytes.
#include "cohort/data/synthetic.h"

#include <algorithm>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/data/check_index.h"

namespace cohort::data {
namespace {

// Each class is a pattern of 4 x 4 cells under noise, so a network can learn it and a test can see that it
// does.
constexpr std::int64_t kGrid = 4;

// Uniform over [-sqrt(3) s, sqrt(3) s], which has deviation s.
float noise(std::uint32_t bits, float deviation) {
  // 24 bits fit a float exactly: the result is the same on every machine.
  return (static_cast<float>(bits >> 8) * 0x1.0p-23F - 1.0F) * 1.7320508F * deviation;
}

}  // namespace

SyntheticDataset::SyntheticDataset(SyntheticOptions options) : options_(std::move(options)) {
  const auto require = [](bool condition, const std::string& what) {
    if (!condition) throw UsageError("data.synthetic", what);
  };
  const auto& shape = options_.shape;
  require(options_.size >= 0, base::concat("size is ", options_.size, ", expected at least 0"));
  require(options_.num_classes > 0,
          base::concat("num_classes is ", options_.num_classes, ", expected at least 1"));
  require(shape.size() == 3 && std::ranges::all_of(shape, [](std::int64_t extent) { return extent > 0; }),
          "shape must be [C, H, W], each at least 1");
  // Patterns draw from epoch 1, samples from epoch 0, so no sample shares a stream with the patterns.
  base::RandomStream random(options_.seed, 1, 0, base::Purpose::kSynthetic);
  patterns_.resize(static_cast<std::size_t>(options_.num_classes * shape[0] * kGrid * kGrid));
  for (float& value : patterns_) value = noise(random.next_u32(), 0.6F);
}

std::vector<Field> SyntheticDataset::fields() const {
  return {{"image", at::kFloat, options_.shape, options_.channels_last}, {"label", at::kLong, {}, false}};
}

void SyntheticDataset::read(std::int64_t index, base::RandomStream&, std::span<std::byte* const> out) const {
  check_index("data.synthetic", index, options_.size);
  // Of the index alone: a sample is the same in each epoch, on any thread and rank.
  base::RandomStream random(options_.seed, 0, static_cast<std::uint64_t>(index), base::Purpose::kSynthetic);
  const std::int64_t label = random.integer(0, options_.num_classes);
  const std::int64_t channels = options_.shape[0], height = options_.shape[1], width = options_.shape[2];
  const float* pattern = patterns_.data() + label * channels * kGrid * kGrid;
  auto* image = reinterpret_cast<float*>(out[0]);
  const std::int64_t pixel_stride = options_.channels_last ? channels : 1;
  const std::int64_t channel_stride = options_.channels_last ? 1 : height * width;
  for (std::int64_t c = 0; c < channels; ++c) {
    for (std::int64_t y = 0; y < height; ++y) {
      const float* row = pattern + (c * kGrid + y * kGrid / height) * kGrid;
      float* to = image + c * channel_stride + y * width * pixel_stride;
      for (std::int64_t x = 0; x < width; ++x) {
        to[x * pixel_stride] = row[x * kGrid / width] + noise(random.next_u32(), 0.8F);
      }
    }
  }
  std::memcpy(out[1], &label, sizeof(label));
}

std::string SyntheticDataset::describe(std::int64_t index) const {
  return base::concat("synthetic sample ", index);
}

std::string SyntheticDataset::fingerprint() const {
  std::string text = base::concat("synthetic ", options_.seed, " ", options_.num_classes, " ", options_.size);
  for (const std::int64_t extent : options_.shape) text += base::concat(" ", extent);
  return text;
}

std::vector<std::string> SyntheticDataset::classes() const {
  std::vector<std::string> names;
  for (std::int64_t i = 0; i < options_.num_classes; ++i) names.push_back(std::to_string(i));
  return names;
}

}  // namespace cohort::data
