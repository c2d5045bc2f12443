// A cut and a mirroring are not carried out when they are planned: they move a view of the pixels and set a
// flag. Pixels are copied only for a padding, before a transform that changes them, and before a mirrored
// image is resized. The last is needed because sums are not symmetric to the last bit; so delay never
// changes a result. ToTensor and Normalize are a table of 256 floats per channel: the last pass only looks up
// bytes. For an encoded file the header plans the first transform, and only its region is decoded.
#include "cohort/data/transforms/transform_pipeline.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/data/transforms/internal/resample.h"
#include "cohort/data/transforms/transform_registry.h"

namespace cohort::data {
namespace {

/// What one thread keeps between images.
struct Scratch {
  Image decoded;
  Image spare[2];
  Resampler resampler;
};

Scratch& thread_scratch() {
  // A pipeline is shared by all workers and has no memory of its own for images.
  static thread_local Scratch scratch;
  return scratch;
}

bool contains(ImageSize size, const Region& region) {
  return region.top >= 0 && region.left >= 0 && region.top + region.height <= size.height &&
         region.left + region.width <= size.width;
}

/// An image on its way through a pipeline: pixels in some buffer, cut and mirrored only when that cannot
/// wait.
class ImageInProgress {
 public:
  ImageInProgress(Image& image, Scratch& scratch) : owner_(&image), scratch_(scratch) { view_whole(); }

  const PixelView& view() const { return view_; }
  bool mirrored() const { return mirrored_; }

  void apply(const CropResizeOp& op) {
    const Region& region = op.region;
    if (region.height < 1 || region.width < 1 || op.size.height < 1 || op.size.width < 1) {
      throw UsageError("data.pipeline", "a transform planned an empty image");
    }
    if (region != Region{0, 0, view_.height, view_.width}) {
      if (contains({view_.height, view_.width}, region)) {
        // The pixels are not mirrored yet, so the region is counted from the other side.
        const int64_t left = mirrored_ ? view_.width - region.left - region.width : region.left;
        view_.data += region.top * view_.stride + left * view_.channels;
        view_.height = region.height;
        view_.width = region.width;
      } else {
        pad(region);
      }
    }
    if (op.size != ImageSize{view_.height, view_.width}) {
      if (mirrored_) {  // sums are not symmetric to the last bit
        copy(Region{0, 0, view_.height, view_.width});
      }
      Image& target = spare();
      scratch_.resampler.resize(view_, op.size, target);
      take(target);
    }
    // Twice mirrored is not mirrored.
    mirrored_ ^= op.mirror;
  }

  /// Returns the pixels as an image of their own; call `view_whole` after changing it.
  Image& image() {
    const bool whole =
        view_.data == owner_->pixels.data() && owner_->size() == ImageSize{view_.height, view_.width};
    if (mirrored_ || !whole) {
      copy(Region{0, 0, view_.height, view_.width});
    }
    return *owner_;
  }

  void view_whole() {
    view_ = {owner_->pixels.data(), owner_->width * owner_->channels, owner_->height, owner_->width,
             owner_->channels};
  }

 private:
  // Two buffers in turn: the one that the view reads is never the one that is written.
  Image& spare() { return owner_ == &scratch_.spare[0] ? scratch_.spare[1] : scratch_.spare[0]; }

  void take(Image& image) {
    owner_ = &image;
    mirrored_ = false;
    view_whole();
  }

  /// Copies `region`, black where it lies outside, and undoes the mirroring.
  void pad(const Region& region) {
    // copy() writes into this same spare, which keeps the black where no pixel comes.
    spare().reshape(region.height, region.width, view_.channels);
    std::fill(spare().pixels.begin(), spare().pixels.end(), uint8_t{0});
    copy(region);
  }

  void copy(const Region& region) {
    Image& target = spare();
    target.reshape(region.height, region.width, view_.channels);
    const int64_t channels = view_.channels;
    const int64_t top = std::max<int64_t>(0, region.top), left = std::max<int64_t>(0, region.left);
    const int64_t bottom = std::min(view_.height, region.top + region.height);
    const int64_t right = std::min(view_.width, region.left + region.width);
    for (int64_t y = top; y < bottom && left < right; ++y) {
      uint8_t* to = target.pixels.data() + ((y - region.top) * region.width + left - region.left) * channels;
      if (!mirrored_) {
        std::memcpy(to, view_.row(y) + left * channels, static_cast<size_t>((right - left) * channels));
        continue;
      }
      const uint8_t* from = view_.row(y) + (view_.width - 1 - left) * channels;
      for (int64_t x = left; x < right; ++x, to += channels, from -= channels) {
        std::copy_n(from, channels, to);
      }
    }
    take(target);
  }

  Image* owner_;
  Scratch& scratch_;
  PixelView view_;
  bool mirrored_ = false;
};

/// Plans, and puts the image's name before what a transform has against it.
CropResizeOp plan_named(const Transform& transform, ImageSize in, base::RandomStream& random,
                        const std::string& name) {
  try {
    return transform.plan(in, random);
  } catch (const DataError& error) {
    // Transforms know the size of an image, not its name.
    throw DataError("data.pipeline", base::concat(name, ": ", error.what()));
  }
}

template <int kChannels>
void write_channels_last(const PixelView& view, bool mirror, const float* table, float* out) {
  for (int64_t y = 0; y < view.height; ++y) {
    const uint8_t* pixel = view.row(y) + (mirror ? (view.width - 1) * kChannels : 0);
    const int64_t step = mirror ? -kChannels : kChannels;
    for (int64_t x = 0; x < view.width; ++x, pixel += step, out += kChannels) {
      for (int c = 0; c < kChannels; ++c) {
        out[c] = table[256 * c + pixel[c]];
      }
    }
  }
}

template <int kChannels>
void write_channels_first(const PixelView& view, bool mirror, const float* table, float* out) {
  const int64_t plane = view.height * view.width;
  for (int64_t y = 0; y < view.height; ++y, out += view.width) {
    const uint8_t* pixel = view.row(y) + (mirror ? (view.width - 1) * kChannels : 0);
    const int64_t step = mirror ? -kChannels : kChannels;
    for (int64_t x = 0; x < view.width; ++x, pixel += step) {
      for (int c = 0; c < kChannels; ++c) {
        out[c * plane + x] = table[256 * c + pixel[c]];
      }
    }
  }
}

void write(const PixelView& view, bool mirror, const float* table, float* out, Layout layout) {
  // With one channel both layouts are the same bytes.
  if (view.channels == 1) {
    write_channels_first<1>(view, mirror, table, out);
  } else if (layout == Layout::kChannelsFirst) {
    write_channels_first<3>(view, mirror, table, out);
  } else {
    write_channels_last<3>(view, mirror, table, out);
  }
}

/// What an entry of a pipeline is.
enum class PipelineStep {
  kImage,  // a registered transform, which works on images
  kToTensor,
  kNormalize,
};

PipelineStep step_of(const TransformSpec& spec) {
  static const std::map<std::string, PipelineStep> own = {{"ToTensor", PipelineStep::kToTensor},
                                                          {"Normalize", PipelineStep::kNormalize}};
  const auto found = own.find(spec.name);
  return found == own.end() ? PipelineStep::kImage : found->second;
}

}  // namespace

TransformPipeline::TransformPipeline(const std::vector<TransformSpec>& specs, ColorMode color,
                                     const DecodeOptions& decode)
    : color_(color), decode_(decode), channels_(num_channels(color)) {
  check_order(specs);
  const TransformSpec* normalize = nullptr;
  for (const TransformSpec& spec : specs) {
    switch (step_of(spec)) {
      case PipelineStep::kToTensor:
        TransformArgs(spec).reject_the_rest();
        break;
      case PipelineStep::kNormalize:
        normalize = &spec;
        break;
      case PipelineStep::kImage:
        transforms_.push_back(make_transform(spec));  // a name that is not registered ends here
        size_ = transforms_.back()->output_size(size_);
        channels_ = transforms_.back()->output_channels(channels_);
        break;
    }
  }
  if (channels_ != 1 && channels_ != 3) {
    throw ConfigError("data.pipeline",
                      base::concat("the transforms give ", channels_, " channels, expected 1 or 3"));
  }
  build_table(normalize);
}

TransformPipeline::~TransformPipeline() = default;
TransformPipeline::TransformPipeline(TransformPipeline&&) noexcept = default;
TransformPipeline& TransformPipeline::operator=(TransformPipeline&&) noexcept = default;

void TransformPipeline::check_order(const std::vector<TransformSpec>& specs) const {
  constexpr const char* kHint = "first what works on images, then ToTensor, then Normalize or nothing";
  const auto to_tensor = std::ranges::find(specs, PipelineStep::kToTensor, step_of);
  for (auto spec = specs.begin(); spec != specs.end(); ++spec) {
    const PipelineStep step = step_of(*spec);
    if (step == PipelineStep::kNormalize && spec < to_tensor) {
      throw ConfigError("data.pipeline", "Normalize stands before ToTensor", kHint);
    }
    if (spec > to_tensor && step != PipelineStep::kNormalize) {
      if (step == PipelineStep::kImage) {
        make_transform(*spec);  // a wrong name is reported before a wrong place
      }
      throw ConfigError("data.pipeline", base::concat(spec->name, " stands after ToTensor"), kHint);
    }
    if (spec > to_tensor + 1) {
      throw ConfigError("data.pipeline", "Normalize stands twice", kHint);
    }
  }
  if (to_tensor == specs.end()) {
    throw ConfigError("data.pipeline", "there is no ToTensor, so no numbers come out", kHint);
  }
}

void TransformPipeline::build_table(const TransformSpec* normalize) {
  std::vector<double> mean = {0.0}, deviation = {1.0};
  if (normalize != nullptr) {
    TransformArgs args(*normalize);
    for (auto* values : {&mean, &deviation}) {
      const std::string key = values == &mean ? "mean" : "std";
      if (!args.has(key)) {
        args.fail(key, "missing");
      }
      *values = args.numbers(key, {});
      if (values->size() != 1 && static_cast<int64_t>(values->size()) != channels_) {
        args.fail(key, base::concat("got ", values->size(), " values, expected ", channels_,
                                    channels_ == 1 ? " (images are gray)" : " (images have colour) or 1"));
      }
    }
    // As a float: a double that is not 0 may round to it.
    if (std::any_of(deviation.begin(), deviation.end(),
                    [](double d) { return static_cast<float>(d) == 0.0f; })) {
      args.fail("std", "got 0, expected a deviation to divide by");
    }
    args.reject_the_rest();
  }
  table_.resize(static_cast<size_t>(channels_ * 256));
  for (size_t i = 0; i < table_.size(); ++i) {
    const size_t channel = i / 256;
    // In single precision and in this order, as torchvision does on tensors.
    const float value = static_cast<float>(i % 256) / 255.0f;
    const auto m = static_cast<float>(mean[mean.size() == 1 ? 0 : channel]);
    const auto d = static_cast<float>(deviation[deviation.size() == 1 ? 0 : channel]);
    table_[i] = normalize == nullptr ? value : (value - m) / d;
  }
}

bool TransformPipeline::has_output_shape() const {
  return size_.height > 0;
}

void TransformPipeline::set_input_size(ImageSize in) {
  for (const auto& transform : transforms_) {
    in = transform->output_size(in);
  }
  size_ = in;
}

ImageShape TransformPipeline::output_shape() const {
  if (!has_output_shape()) {
    throw UsageError("data.pipeline", "the size of what comes out depends on the images",
                     "add Resize with height and width, or a crop; or call set_input_size");
  }
  return {channels_, size_.height, size_.width};
}

void TransformPipeline::run(Image& image, base::RandomStream& random, float* out, Layout layout,
                            const std::string& name) const {
  run_from(image, nullptr, random, out, layout, name);
}

void TransformPipeline::run_encoded(std::span<const std::byte> file, const std::string& name,
                                    base::RandomStream& random, float* out, Layout layout) const {
  ImageDecoder& decoder = thread_decoder();
  Image& decoded = thread_scratch().decoded;
  const ImageHeader header = decoder.open(file, color_, name, decode_);
  if (transforms_.empty()) {
    decoder.read(decoded);
    run_from(decoded, nullptr, random, out, layout, name);
    return;
  }
  // Drawn before the pixels are decoded and from the same stream as in run(), so both ways give the same
  // numbers.
  CropResizeOp first = plan_named(*transforms_[0], header.size(), random, name);
  if (contains(header.size(), first.region) && first.region.height > 0 && first.region.width > 0) {
    decoder.read(first.region, decoded);
    // The decoder has cut already; what is left of the operation is its size and its mirroring.
    first.region = {0, 0, decoded.height, decoded.width};
  } else {
    decoder.read(decoded);
  }
  run_from(decoded, &first, random, out, layout, name);
}

void TransformPipeline::run_from(Image& image, const CropResizeOp* first, base::RandomStream& random,
                                 float* out, Layout layout, const std::string& name) const {
  const ImageShape shape = output_shape();
  if (image.channels != num_channels(color_)) {
    throw UsageError("data.pipeline", base::concat(name, ": got ", image.channels, " channels, expected ",
                                                   num_channels(color_)));
  }
  ImageInProgress image_in_progress(image, thread_scratch());
  for (const auto& transform : transforms_) {
    const ImageSize size{image_in_progress.view().height, image_in_progress.view().width};
    image_in_progress.apply(first != nullptr ? *first : plan_named(*transform, size, random, name));
    first = nullptr;
    if (transform->changes_pixels()) {
      transform->apply(image_in_progress.image(), random);
      image_in_progress.view_whole();
    }
  }
  const PixelView& view = image_in_progress.view();
  // `out` has room for exactly this shape.
  if (ImageShape{view.channels, view.height, view.width} != shape) {
    throw DataError("data.pipeline",
                    base::concat(name, ": got an image of ", view.channels, "x", view.height, "x", view.width,
                                 " after the transforms, expected ", shape[0], "x", shape[1], "x", shape[2]),
                    "add Resize with height and width, or a crop, so that all images come out alike");
  }
  write(view, image_in_progress.mirrored(), table_.data(), out, layout);
}

}  // namespace cohort::data
