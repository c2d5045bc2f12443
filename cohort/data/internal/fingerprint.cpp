#include "cohort/data/internal/fingerprint.h"

#include <xxhash.h>

#include <array>
#include <cstdio>
#include <new>

namespace cohort::data {

struct Fingerprint::State {
  XXH3_state_t* hash = XXH3_createState();
  ~State() { XXH3_freeState(hash); }
};

Fingerprint::Fingerprint() : state_(std::make_unique<State>()) {
  if (state_->hash == nullptr) throw std::bad_alloc();
  XXH3_64bits_reset(state_->hash);
}
Fingerprint::~Fingerprint() = default;

void Fingerprint::add(const void* bytes, std::size_t size) {
  XXH3_64bits_update(state_->hash, bytes, size);
}

std::string Fingerprint::text() const {
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx",
                static_cast<unsigned long long>(XXH3_64bits_digest(state_->hash)));
  return digits.data();
}

}  // namespace cohort::data
