#include "cohort/models/lenet.h"

#include <utility>

#include "cohort/base/error.h"
#include "cohort/models/internal/checks.h"
#include "cohort/models/observer.h"

namespace cohort::models {
namespace {

// Below this the second pool has no pixel left: (12 / 2 - 4) / 2 is 1.
constexpr std::int64_t kSmallest = 12;

/// The side that fc1 sees.
std::int64_t final_side(const ModelOptions& options) {
  // LeCun et al. 1998, section II.B, works on 32 x 32 pixels. Smaller images, such as MNIST's 28 x 28, are
  // padded by 2 on each side, so that the first convolution keeps their size.
  const std::int64_t first = options.image_size < 32 ? options.image_size : options.image_size - 4;
  return (first / 2 - 4) / 2;
}

}  // namespace

LeNet5Impl::LeNet5Impl(ModelOptions options) : Model<LeNet5Impl>("LeNet5"), options_(std::move(options)) {
  check_options(options_, {});
  check_image_size(options_, kSmallest);
  reset();
}

void LeNet5Impl::reset() {
  namespace nn = torch::nn;
  const std::int64_t padding = options_.image_size < 32 ? 2 : 0;
  const std::int64_t side = final_side(options_);
  conv1 =
      register_module("conv1", nn::Conv2d(nn::Conv2dOptions(options_.in_channels, 6, 5).padding(padding)));
  conv2 = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(6, 16, 5)));
  fc1 = register_module("fc1", nn::Linear(16 * side * side, 120));
  fc2 = register_module("fc2", nn::Linear(120, 84));
  fc3 = register_module("fc3", nn::Linear(84, options_.num_classes));
  relu = register_module("relu", nn::ReLU(nn::ReLUOptions(true)));
  pool = register_module("pool", nn::MaxPool2d(nn::MaxPool2dOptions(2).stride(2)));
}

at::Tensor LeNet5Impl::forward(const at::Tensor& images) {
  check_images(options_, images, kSmallest);
  // fc1 has a weight for each pixel, and its own message would name a product of sizes.
  if (images.size(2) != options_.image_size || images.size(3) != options_.image_size) {
    throw UsageError("models.forward", base::concat(options_.name, " was built for images of ",
                                                    options_.image_size, " x ", options_.image_size,
                                                    " pixels: got ", images.size(2), " x ", images.size(3)));
  }
  at::Tensor value = observed(*pool, observed(*relu, observed(*conv1, images)));
  value = observed(*pool, observed(*relu, observed(*conv2, value)));
  value = observed(*relu, observed(*fc1, value.flatten(1)));
  value = observed(*relu, observed(*fc2, value));
  return observed(*fc3, value);
}

}  // namespace cohort::models
