#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/source_dir.h"

/// What tests/data/golden/make_images.py has written, by name.
namespace cohort::data {

inline const std::map<std::string, std::string>& golden() {
  static const std::map<std::string, std::string> records = [] {
    const std::string path = test::source_dir() / "tests/data/golden/images.bin";
    std::ifstream stream(path, std::ios::binary);
    std::map<std::string, std::string> read;
    std::string name;
    size_t size = 0;
    while (stream >> name >> size) {
      stream.get();
      std::string bytes(size, '\0');
      stream.read(bytes.data(), static_cast<std::streamsize>(size));
      read[name] = std::move(bytes);
    }
    if (read.empty()) {
      throw std::runtime_error("no golden images in " + path);
    }
    return read;
  }();
  return records;
}

inline std::vector<std::byte> to_bytes(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

inline std::vector<std::byte> golden_bytes(const std::string& name) {
  return to_bytes(golden().at(name));
}

inline std::vector<uint8_t> golden_pixels(const std::string& name) {
  const std::string& text = golden().at(name);
  return {text.begin(), text.end()};
}

}  // namespace cohort::data
