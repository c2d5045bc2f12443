#pragma once

#include <memory>
#include <span>
#include <string>

#include "cohort/data/codecs/image_header.h"

/// Part of ImageDecoder: JPEG through libjpeg-turbo, with one decompressor for all images.
namespace cohort::data {

class JpegReader {
 public:
  JpegReader();
  ~JpegReader();

  ImageHeader open(std::span<const std::byte> file, ColorMode color, const std::string& name,
                   const DecodeOptions& options);
  void read(const Region& region, Image& out);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cohort::data
