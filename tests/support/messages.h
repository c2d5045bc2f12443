#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

namespace cohort::test {

/// Expects every one of `parts` in `message`; the failure shows which is missing and the message.
inline void expect_in(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "expected \"" << part << "\" in: " << message;
  }
}

}  // namespace cohort::test
