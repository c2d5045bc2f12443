// A transform here computes a region, a size and a mirroring from the image's size and the random stream.
// Pixels are changed by Grayscale alone, whose three channels are written from the end, so that it works in
// place. RandomResizedCrop draws at most ten regions, and then takes the largest allowed region in the
// middle. Sizes that do not fit are rejected here with the transform's name, before any pixel is moved.
#include <algorithm>
#include <cmath>

#include "cohort/base/error.h"
#include "cohort/data/codecs/internal/color.h"
#include "cohort/data/transforms/internal/builtin.h"

// Each plan follows torchvision.transforms.v1 line by line; Python's round() is std::nearbyint (half to
// even).
namespace cohort::data {
namespace {

int64_t round_half_even(double value) {
  return static_cast<int64_t>(std::nearbyint(value));
}

Region whole(ImageSize in) {
  return {0, 0, in.height, in.width};
}

class Resize : public Transform {
 public:
  explicit Resize(TransformArgs& args) {
    const std::vector<int64_t> size = args.integers("size", 1, 2);
    size_ = args.size("size");
    shorter_side_ = size.size() == 1;
    max_size_ = args.integer("max_size", 0);
    if (args.has("max_size") && (!shorter_side_ || max_size_ <= size_.height)) {
      args.fail("max_size",
                base::concat("got ", max_size_, ", expected more than size, which is one number then"));
    }
  }

  CropResizeOp plan(ImageSize in, base::RandomStream&) const override {
    return {whole(in), output_size(in), false};
  }

  ImageSize output_size(ImageSize in) const override {
    if (!shorter_side_) {
      return size_;
    }
    // The pipeline asks so while it does not know the size of its images; the answer is "unknown" again.
    if (in.height == 0) {
      return {0, 0};
    }
    const bool wide = in.width > in.height;
    const int64_t short_side = wide ? in.height : in.width;
    const int64_t long_side = wide ? in.width : in.height;
    int64_t new_short = size_.height;
    int64_t new_long =
        // int(size * long / short), truncated as torchvision does.
        static_cast<int64_t>(static_cast<double>(size_.height * long_side) / static_cast<double>(short_side));
    if (max_size_ > 0 && new_long > max_size_) {
      new_short =
          static_cast<int64_t>(static_cast<double>(max_size_ * new_short) / static_cast<double>(new_long));
      new_long = max_size_;
    }
    new_short = std::max<int64_t>(new_short, 1);
    // An image of one row would otherwise ask for gigabytes.
    if (new_long > 1 << 18) {
      throw DataError("data.transforms", base::concat("Resize: an image of ", in.height, "x", in.width,
                                                      " would become ", new_long, " pixels long"));
    }
    return wide ? ImageSize{new_short, new_long} : ImageSize{new_long, new_short};
  }

 private:
  ImageSize size_;
  bool shorter_side_ = false;
  int64_t max_size_ = 0;
};

class CenterCrop : public Transform {
 public:
  explicit CenterCrop(TransformArgs& args) : size_(args.size("size")) {}

  CropResizeOp plan(ImageSize in, base::RandomStream&) const override {
    return {{start(in.height, size_.height), start(in.width, size_.width), size_.height, size_.width},
            size_,
            false};
  }
  ImageSize output_size(ImageSize) const override { return size_; }

 private:
  static int64_t start(int64_t have, int64_t want) {
    // Where the image is too small torchvision pads, rounding down; else it crops, rounding half to even.
    return want > have ? -((want - have) / 2) : round_half_even(static_cast<double>(have - want) / 2.0);
  }
  ImageSize size_;
};

class RandomCrop : public Transform {
 public:
  explicit RandomCrop(TransformArgs& args) : size_(args.size("size")) {
    if (args.has("padding")) {
      // One number for all sides; two for left-right and top-bottom; or left, top, right, bottom.
      const std::vector<int64_t> padding = args.integers("padding", 1, 4);
      if (padding.size() == 3) {
        args.fail("padding", "got 3 values, expected 1, 2 or 4");
      }
      for (size_t i = 0; i < 4; ++i) {
        padding_[i] = padding[i % padding.size()];
        if (padding_[i] < 0 || padding_[i] > 65535) {
          args.fail("padding", base::concat("got ", padding_[i], ", expected 0 to 65535 pixels"));
        }
      }
    }
    pad_if_needed_ = args.integer("pad_if_needed", 0) != 0;
  }

  CropResizeOp plan(ImageSize in, base::RandomStream& random) const override {
    int64_t left = padding_[0], top = padding_[1];
    int64_t width = in.width + left + padding_[2], height = in.height + top + padding_[3];
    if (pad_if_needed_ && width < size_.width) {
      // On both sides, as torchvision: the crop then moves within twice the missing part.
      const int64_t missing = size_.width - width;
      left += missing;
      width += 2 * missing;
    }
    if (pad_if_needed_ && height < size_.height) {
      const int64_t missing = size_.height - height;
      top += missing;
      height += 2 * missing;
    }
    if (height < size_.height || width < size_.width) {
      throw DataError("data.transforms",
                      base::concat("RandomCrop: got an image of ", height, "x", width,
                                   " with its padding, expected at least ", size_.height, "x", size_.width),
                      "pad_if_needed: true, or a Resize before it");
    }
    // The row is drawn before the column. Another order would give other crops for the same seed.
    const int64_t y = random.integer(0, height - size_.height + 1);
    const int64_t x = random.integer(0, width - size_.width + 1);
    return {{y - top, x - left, size_.height, size_.width}, size_, false};
  }
  ImageSize output_size(ImageSize) const override { return size_; }

 private:
  ImageSize size_;
  int64_t padding_[4] = {0, 0, 0, 0};
  bool pad_if_needed_ = false;
};

class RandomResizedCrop : public Transform {
 public:
  explicit RandomResizedCrop(TransformArgs& args) : size_(args.size("size")) {
    const std::vector<double> scale = args.numbers("scale", {0.08, 1.0});
    const std::vector<double> ratio = args.numbers("ratio", {3.0 / 4.0, 4.0 / 3.0});
    check(args, "scale", scale);
    check(args, "ratio", ratio);
    std::copy(scale.begin(), scale.end(), scale_);
    std::copy(ratio.begin(), ratio.end(), ratio_);
  }

  CropResizeOp plan(ImageSize in, base::RandomStream& random) const override {
    const auto area = static_cast<double>(in.height * in.width);
    // Uniform in the logarithm: a ratio and its inverse are equally likely. Szegedy et al. 2015, "Going
    // Deeper with Convolutions", section 6.
    const double log_ratio[2] = {std::log(ratio_[0]), std::log(ratio_[1])};
    for (int attempt = 0; attempt < 10; ++attempt) {
      const double target = area * random.uniform(scale_[0], scale_[1]);
      const double aspect = std::exp(random.uniform(log_ratio[0], log_ratio[1]));
      const double exact_width = std::sqrt(target * aspect), exact_height = std::sqrt(target / aspect);
      // Too large for an integer, infinite or NaN. It counts as one of the ten tries.
      if (!(exact_width <= 1e9 && exact_height <= 1e9)) {
        continue;
      }
      const int64_t width = round_half_even(exact_width), height = round_half_even(exact_height);
      if (width > 0 && width <= in.width && height > 0 && height <= in.height) {
        const int64_t top = random.integer(0, in.height - height + 1);
        const int64_t left = random.integer(0, in.width - width + 1);
        return {{top, left, height, width}, size_, false};
      }
    }
    return {fallback(in), size_, false};
  }
  ImageSize output_size(ImageSize) const override { return size_; }

 private:
  static void check(const TransformArgs& args, const std::string& key, const std::vector<double>& range) {
    if (!(range[0] > 0) || range[1] < range[0]) {
      args.fail(key, base::concat("got [", range[0], ", ", range[1],
                                  "], expected two positive numbers, the lower first"));
    }
  }

  /// The largest region in the middle whose ratio is allowed.
  Region fallback(ImageSize in) const {
    // Only the ratio is kept within its limits; the area may leave the scale that was asked for.
    const double ratio = static_cast<double>(in.width) / static_cast<double>(in.height);
    int64_t width = in.width, height = in.height;
    if (ratio < ratio_[0]) {
      height = std::clamp<int64_t>(round_half_even(static_cast<double>(width) / ratio_[0]), 1, in.height);
    } else if (ratio > ratio_[1]) {
      width = std::clamp<int64_t>(round_half_even(static_cast<double>(height) * ratio_[1]), 1, in.width);
    }
    return {(in.height - height) / 2, (in.width - width) / 2, height, width};
  }

  ImageSize size_;
  double scale_[2];
  double ratio_[2];
};

class RandomHorizontalFlip : public Transform {
 public:
  explicit RandomHorizontalFlip(TransformArgs& args) : p_(args.number("p", 0.5)) {
    if (p_ < 0 || p_ > 1) {
      args.fail("p", base::concat("got ", p_, ", expected a probability, 0 to 1"));
    }
  }
  CropResizeOp plan(ImageSize in, base::RandomStream& random) const override {
    return {whole(in), in, random.bernoulli(p_)};
  }

 private:
  double p_;
};

class Grayscale : public Transform {
 public:
  explicit Grayscale(TransformArgs& args) : channels_(args.integer("num_output_channels", 1)) {
    if (channels_ != 1 && channels_ != 3) {
      args.fail("num_output_channels", base::concat("got ", channels_, ", expected 1 or 3"));
    }
  }
  bool changes_pixels() const override { return true; }
  int64_t output_channels(int64_t) const override { return channels_; }

  void apply(Image& image, base::RandomStream&) const override {
    const int64_t count = image.height * image.width;
    if (image.channels == 3) {
      // In place: pixel i is read at 3 i and written at i, never before it was read.
      rgb_to_gray(image.pixels.data(), count, image.pixels.data());
    }
    image.reshape(image.height, image.width, channels_);
    if (channels_ == 3) {  // from the end, in place
      for (int64_t i = count - 1; i >= 0; --i) {
        const uint8_t value = image.pixels[static_cast<size_t>(i)];
        std::fill_n(image.pixels.begin() + 3 * i, 3, value);
      }
    }
  }

 private:
  int64_t channels_;
};

template <typename T>
BuiltinTransform builtin(std::string name, std::string first_argument) {
  return {std::move(name), std::move(first_argument),
          [](TransformArgs& args) -> std::unique_ptr<Transform> { return std::make_unique<T>(args); }};
}

}  // namespace

std::vector<BuiltinTransform> builtin_transforms() {
  return {builtin<Resize>("Resize", "size"),
          builtin<CenterCrop>("CenterCrop", "size"),
          builtin<RandomCrop>("RandomCrop", "size"),
          builtin<RandomResizedCrop>("RandomResizedCrop", "size"),
          builtin<RandomHorizontalFlip>("RandomHorizontalFlip", "p"),
          builtin<Grayscale>("Grayscale", "num_output_channels")};
}

}  // namespace cohort::data
