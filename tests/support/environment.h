#pragma once

#include <stdlib.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace cohort::test {

/// Returns the number that an environment variable gives, so that a test can run for long; else `otherwise`.
inline std::uint64_t env_number(const char* variable, std::uint64_t otherwise) {
  const char* const text = ::getenv(variable);
  return text == nullptr ? otherwise : std::stoull(text);
}

/// Sets an environment variable, or removes it when no value is given, as long as this object lives.
class ScopedEnv {
 public:
  ScopedEnv(std::string name, std::optional<std::string> value) : name_(std::move(name)) {
    if (const char* before = ::getenv(name_.c_str())) before_ = before;
    set(value);
  }
  ~ScopedEnv() { set(before_); }
  ScopedEnv(const ScopedEnv&) = delete;
  ScopedEnv& operator=(const ScopedEnv&) = delete;

 private:
  void set(const std::optional<std::string>& value) {
    if (value) {
      ::setenv(name_.c_str(), value->c_str(), 1);
    } else {
      ::unsetenv(name_.c_str());
    }
  }

  std::string name_;
  std::optional<std::string> before_;
};

}  // namespace cohort::test
