#include "cohort/data/idx_dataset.h"

#include <algorithm>
#include <cstring>

#include "cohort/base/error.h"
#include "cohort/data/check_index.h"
#include "cohort/data/internal/fingerprint.h"

namespace cohort::data {

IdxDataset::IdxDataset(const std::string& images, const std::string& labels, const IdxDatasetOptions& options)
    : name_(images),
      images_(read_idx_images(images)),
      labels_(read_idx_labels(labels)),
      channels_(images_.shape.size() == 4 ? images_.shape[3] : 1),
      pipeline_(
          options.transforms.empty() ? std::vector<TransformSpec>{{"ToTensor", {}}} : options.transforms,
          channels_ == 1 ? ColorMode::kGray : ColorMode::kRgb),
      channels_last_(options.channels_last) {
  if (images_.shape[0] != labels_.shape[0]) {
    throw DataError("data.idx",
                    base::concat(images, " has ", images_.shape[0], " images, ", labels, " has ",
                                 labels_.shape[0], " labels"),
                    "files of the same set");
  }
  // All images of a file have one size, so it can stand for that of the transforms' input.
  if (!pipeline_.has_output_shape()) pipeline_.set_input_size({images_.shape[1], images_.shape[2]});
}

std::vector<Field> IdxDataset::fields() const {
  const ImageShape shape = pipeline_.output_shape();
  return {{"image", at::kFloat, {shape.begin(), shape.end()}, channels_last_},
          {"label", at::kLong, {}, false}};
}

void IdxDataset::read(std::int64_t index, base::RandomStream& random, std::span<std::byte* const> out) const {
  check_index("data.idx", index, size());
  // A copy, since transforms work in place and the array is shared by all threads and epochs.
  thread_local Image image;
  image.reshape(images_.shape[1], images_.shape[2], channels_);
  const std::byte* pixels = images_.bytes.data() + static_cast<std::size_t>(index) * image.pixels.size();
  std::memcpy(image.pixels.data(), pixels, image.pixels.size());
  pipeline_.run(image, random, reinterpret_cast<float*>(out[0]),
                channels_last_ ? Layout::kChannelsLast : Layout::kChannelsFirst, name_);
  const auto label = std::to_integer<std::int64_t>(labels_.bytes[static_cast<std::size_t>(index)]);
  std::memcpy(out[1], &label, sizeof(label));
}

std::string IdxDataset::describe(std::int64_t index) const {
  return base::concat(name_, " [", index, "]");
}

std::string IdxDataset::fingerprint() const {
  // All bytes, not names: the files may be renamed, and hashing them takes a fraction of reading them.
  Fingerprint fingerprint;
  for (const IdxArray* array : {&images_, &labels_}) {
    fingerprint.add(array->shape.data(), array->shape.size() * sizeof(array->shape[0]));
    fingerprint.add(array->bytes.data(), array->bytes.size());
  }
  return fingerprint.text();
}

std::vector<std::string> IdxDataset::classes() const {
  const auto largest = std::ranges::max_element(labels_.bytes);
  std::vector<std::string> names;
  // Up to the largest label, also where some label between does not occur.
  for (int i = 0; largest != labels_.bytes.end() && i <= std::to_integer<int>(*largest); ++i) {
    names.push_back(std::to_string(i));
  }
  return names;
}

}  // namespace cohort::data
