#pragma once

#include <cstddef>
#include <memory>
#include <string>

/// Fingerprints of samples: XXH3 of 64 bits. No LibTorch.
namespace cohort::data {

/// A hash of what was added, in order.
class Fingerprint {
 public:
  Fingerprint();
  ~Fingerprint();
  Fingerprint(const Fingerprint&) = delete;
  Fingerprint& operator=(const Fingerprint&) = delete;

  void add(const void* bytes, std::size_t size);
  /// 16 hexadecimal digits.
  std::string text() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cohort::data
