#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/data/transforms/transform_pipeline.h"

// Decodes the bytes whole and in part, as colour and gray, and runs pipelines on them. Beyond "no crash" it
// checks that a region is what the whole image has there, and that no decode depends on what was decoded
// before.
using namespace cohort;
using namespace cohort::data;

namespace {

void check(bool holds, const char* what) {
  if (!holds) {
    std::fputs(what, stderr);
    std::abort();
  }
}

bool decode(std::span<const std::byte> file, ColorMode color, bool accept_damage, Image& out) {
  DecodeOptions options;
  options.max_pixels = 1 << 16;
  options.accept_damage = accept_damage;
  try {
    decode_image(file, color, "fuzz", out, options);
    return true;
  } catch (const DataError&) {
    return false;
  }
}

void check_region(std::span<const std::byte> file, ColorMode color, const Image& whole,
                  base::RandomStream& random) {
  Region region;
  region.height = random.integer(1, whole.height + 1);
  region.width = random.integer(1, whole.width + 1);
  region.top = random.integer(0, whole.height - region.height + 1);
  region.left = random.integer(0, whole.width - region.width + 1);
  Image part;
  thread_decoder().open(file, color, "fuzz");
  thread_decoder().read(region, part);
  const int64_t row = region.width * whole.channels;
  for (int64_t y = 0; y < region.height; ++y) {
    const uint8_t* want =
        whole.pixels.data() + ((region.top + y) * whole.width + region.left) * whole.channels;
    check(std::memcmp(part.pixels.data() + y * row, want, static_cast<size_t>(row)) == 0,
          "a region differs\n");
  }
}

std::vector<std::unique_ptr<TransformPipeline>> make_pipelines() {
  DecodeOptions options;
  options.max_pixels = 1 << 16;
  std::vector<std::unique_ptr<TransformPipeline>> pipelines;
  const auto add = [&](const std::vector<TransformSpec>& specs, ColorMode color) {
    pipelines.push_back(std::make_unique<TransformPipeline>(specs, color, options));
  };
  add({random_resized_crop(24), random_horizontal_flip(), to_tensor(),
       normalize({0.5, 0.4, 0.3}, {0.2, 0.2, 0.2})},
      ColorMode::kRgb);
  add({resize(ImageSize{30, 20}), center_crop(24), to_tensor()}, ColorMode::kRgb);
  add({random_crop(17, 4, true), random_horizontal_flip(), grayscale(3), to_tensor()}, ColorMode::kGray);
  return pipelines;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  uint64_t seed = 1469598103934665603u;
  for (size_t i = 0; i < size; i += 1 + size / 64) {
    seed = (seed ^ data[i]) * 1099511628211u;
  }
  base::RandomStream random(seed, 0, size, base::Purpose::kTransform);
  Image image, again;
  for (const ColorMode color : {ColorMode::kRgb, ColorMode::kGray}) {
    decode(file, color, true, image);
    if (decode(file, color, false, image)) {
      check(decode(file, color, true, again) && again.pixels == image.pixels,
            "damage was found in a sound file\n");
      for (int i = 0; i < 3; ++i) {
        check_region(file, color, image, random);
      }
    }
  }
  static const std::vector<std::unique_ptr<TransformPipeline>> pipelines = make_pipelines();
  for (const auto& pipeline : pipelines) {
    const ImageShape shape = pipeline->output_shape();
    // Exactly as large as promised, so that a write after it is seen.
    const auto out = std::make_unique<float[]>(static_cast<size_t>(shape[0] * shape[1] * shape[2]));
    try {
      pipeline->run_encoded(file, "fuzz", random, out.get(),
                            seed % 2 == 0 ? Layout::kChannelsFirst : Layout::kChannelsLast);
    } catch (const DataError&) {
    }
  }
  return 0;
}
