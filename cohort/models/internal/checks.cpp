// An option that a model does not use must have its default, so a setting never stays without effect in
// silence. Options of a name of their own are checked against the names that the model uses, with the nearest
// in the message. A value equal to its default cannot be told from one that was not set, and passes.
#include "cohort/models/internal/checks.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/text/nearest_name.h"

namespace cohort::models {
namespace {

constexpr std::string_view kWhere = "models.options";

template <typename T>
void check_default(const ModelOptions& options, std::string_view option, const T& value, const T& standard,
                   std::initializer_list<std::string_view> used) {
  if (value == standard || std::find(used.begin(), used.end(), option) != used.end()) return;
  throw UsageError(kWhere, base::concat(options.name, " has no option `", option, "`: got ", value),
                   base::concat("leave `", option, "` at its default, ", standard));
}

void check_extra(const ModelOptions& options, std::initializer_list<std::string_view> used) {
  std::vector<std::string> known(used.begin(), used.end());
  for (const auto& [name, value] : options.extra) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const auto near = base::nearest_name(name, known);
    throw UsageError(kWhere, base::concat(options.name, " has no option `", name, "`"),
                     near ? base::concat("did you mean `", *near, "`?") : "remove it");
  }
}

std::string shape_text(const at::Tensor& tensor) {
  return base::concat(tensor.sizes());
}

}  // namespace

void check_options(const ModelOptions& options, std::initializer_list<std::string_view> used) {
  const ModelOptions standard;
  const auto at_least_one = [&](std::string_view option, std::int64_t value) {
    if (value < 1) {
      throw UsageError(kWhere,
                       base::concat(options.name, ": ", option, " is ", value, ", expected at least 1"));
    }
  };
  at_least_one("num_classes", options.num_classes);
  at_least_one("in_channels", options.in_channels);
  at_least_one("image_size", options.image_size);
  // Written as a negation, so that NaN is rejected too.
  if (!(options.width > 0 && options.width <= 64)) {
    throw UsageError(kWhere, base::concat(options.name, ": width is ", options.width,
                                          ", expected above 0 and at most 64"));
  }
  if (!(options.dropout >= 0 && options.dropout <= 1)) {
    throw UsageError(kWhere, base::concat(options.name, ": dropout is ", options.dropout,
                                          ", expected at least 0 and at most 1"));
  }
  check_default(options, "width", options.width, standard.width, used);
  check_default(options, "dropout", options.dropout, standard.dropout, used);
  check_default(options, "pools", options.pools, standard.pools, used);
  check_default(options, "head", options.head, standard.head, used);
  check_extra(options, used);
}

void check_image_size(const ModelOptions& options, std::int64_t smallest) {
  if (options.image_size >= smallest) return;
  throw UsageError(kWhere,
                   base::concat(options.name, " does not fit images of ", options.image_size, " x ",
                                options.image_size, " pixels, the smallest is ", smallest, " x ", smallest),
                   "resize the images, or a model that halves them less often (VGG: fewer `pools`)");
}

void check_images(const ModelOptions& options, const at::Tensor& input, std::int64_t smallest) {
  // Called for each batch, so the good case is one comparison and no text is made.
  if (input.dim() == 4 && input.size(1) == options.in_channels && input.size(2) >= smallest &&
      input.size(3) >= smallest) [[likely]] {
    return;
  }
  throw UsageError("models.forward",
                   base::concat(options.name, " cannot take an input of shape ", shape_text(input),
                                ", expected [batch, ", options.in_channels,
                                ", height, width], the smallest is ", smallest, " x ", smallest, " pixels"),
                   "in_channels 1 for gray images, 3 for colour (data.color: gray or rgb in a "
                   "configuration); larger images");
}

std::int64_t scaled(const ModelOptions& options, std::int64_t channels) {
  // At least one channel: a layer without any would pass no signal and no gradient.
  return std::max<std::int64_t>(1, std::llround(static_cast<double>(channels) * options.width));
}

}  // namespace cohort::models
