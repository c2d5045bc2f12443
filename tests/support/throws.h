#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <string_view>

/// COHORT_EXPECT_THROW_WITH(statement, Type, "substring"): passes when `statement` throws `Type` (or a type
/// derived from it) whose message contains the substring. Another type, another message and no exception at
/// all fail, and the failure shows what came instead.
namespace cohort::test {

inline ::testing::AssertionResult message_contains(std::string_view message, std::string_view part) {
  if (message.find(part) != std::string_view::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "expected a message with\n  \"" << part << "\"\ngot\n  \"" << message << "\"";
}

/// Runs `body` and says whether it threw `E` with a message that contains `part`.
template <typename E, typename Body>
::testing::AssertionResult throws_with(const Body& body, std::string_view part, const char* statement,
                                       const char* type) {
  try {
    body();
  } catch (const E& error) {
    return message_contains(error.what(), part);
  } catch (const std::exception& error) {
    return ::testing::AssertionFailure()
           << statement << "\nthrew something other than " << type << ": \"" << error.what() << "\"";
  } catch (...) {
    return ::testing::AssertionFailure()
           << statement << "\nthrew something that is no std::exception, not " << type;
  }
  return ::testing::AssertionFailure()
         << statement << "\nthrew nothing, expected " << type << " with \"" << part << "\"";
}

}  // namespace cohort::test

// `Type` may be `cohort::DataError` or, inside namespace cohort, `DataError`. A statement with a comma
// outside of parentheses needs parentheses around it, as with every macro.
#define COHORT_EXPECT_THROW_WITH(statement, Type, part) \
  EXPECT_TRUE(                                          \
      ::cohort::test::throws_with<Type>([&]() { static_cast<void>(statement); }, part, #statement, #Type))

#define COHORT_ASSERT_THROW_WITH(statement, Type, part) \
  ASSERT_TRUE(                                          \
      ::cohort::test::throws_with<Type>([&]() { static_cast<void>(statement); }, part, #statement, #Type))
