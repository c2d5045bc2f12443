#include "cohort/rpc/function.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

at::Tensor scaled(const at::Tensor& x, double by) {
  return x * by;
}
int calls = 0;
void count_call() {
  ++calls;
}
std::vector<std::string> words(std::string text, std::optional<int> times) {
  return std::vector<std::string>(static_cast<std::size_t>(times.value_or(1)), text);
}
const std::string& longest(const std::vector<std::string>& of) {
  return of.at(0);
}
int throws_far(int x) {
  throw std::out_of_range("no " + std::to_string(x));
}
int unknown(int x) {
  return x;
}
std::unique_ptr<int> boxed(std::unique_ptr<int> value) {
  return value;
}

std::unique_ptr<Promise<std::string>> later;
Future<std::string> answers_afterwards(std::string question) {
  later = std::make_unique<Promise<std::string>>();
  return question.empty() ? throw DataError("test", "no question") : later->future();
}
Promise<std::string>* shared_answer = nullptr;
Future<std::string> answers_all() {
  return shared_answer->future();
}
COHORT_REMOTE(answers_all);
COHORT_REMOTE(answers_afterwards);
COHORT_REMOTE(scaled);
COHORT_REMOTE(count_call);
COHORT_REMOTE(words);
COHORT_REMOTE(longest);
COHORT_REMOTE(throws_far);
COHORT_REMOTE(boxed);

std::string text_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
  return "none";
}

Encoded invoke(const char* name, const Encoded& arguments) {
  Encoded result;
  std::exception_ptr error;
  find_function(name).invoke(arguments, [&](Encoded value, std::exception_ptr thrown) {
    result = std::move(value);
    error = thrown;
  });
  if (error) std::rethrow_exception(error);
  return result;
}

template <auto function, typename... Args>
auto call(Args&&... args) {
  return decode_result<function>(
      invoke(name_of<function>(), encode_arguments<function>(std::forward<Args>(args)...)));
}

TEST(FunctionTest, ACallGoesByNameAndBytes) {
  EXPECT_TRUE(at::equal(call<scaled>(at::ones({3}), 2), at::full({3}, 2.0))) << "the integer is converted";
  EXPECT_EQ((call<words>("ab", 2)), (std::vector<std::string>{"ab", "ab"}));
  EXPECT_EQ((call<words>("ab", std::nullopt)), (std::vector<std::string>{"ab"}));
  EXPECT_EQ(call<longest>(std::vector<std::string>{"x"}), "x") << "of a reference a value comes back";
  EXPECT_EQ(*call<boxed>(std::make_unique<int>(4)), 4) << "what cannot be copied is moved";
  call<count_call>();
  EXPECT_EQ(calls, 1);
  EXPECT_THROW(call<throws_far>(3), std::out_of_range);
}

TEST(FunctionTest, AFunctionMayAnswerLater) {
  std::string answer;
  find_function("answers_afterwards")
      .invoke(encode_arguments<answers_afterwards>("why"),
              [&](Encoded value, std::exception_ptr) { answer = decode_result<answers_afterwards>(value); });
  EXPECT_EQ(answer, "");
  later->set_value("because");
  EXPECT_EQ(answer, "because");
  EXPECT_EQ(all_signatures().at("answers_afterwards"), "(string) -> string");

  std::string error;
  const auto take_error = [&](Encoded, std::exception_ptr thrown) { error = text_of(thrown); };
  find_function("answers_afterwards").invoke(encode_arguments<answers_afterwards>("why"), take_error);
  later.reset();
  EXPECT_NE(error.find("will never come"), std::string::npos) << error;
  find_function("answers_afterwards").invoke(encode_arguments<answers_afterwards>(""), take_error);
  EXPECT_NE(error.find("no question"), std::string::npos) << error;
}

TEST(FunctionTest, OnePromiseMayAnswerSeveralCalls) {
  Promise<std::string> promise;
  shared_answer = &promise;
  std::vector<std::string> answers;
  const auto invoke_once = [&] {
    find_function("answers_all")
        .invoke(encode_arguments<answers_all>(), [&](Encoded value, std::exception_ptr error) {
          answers.push_back(error ? text_of(error) : decode_result<answers_all>(value));
        });
  };
  invoke_once();
  invoke_once();
  EXPECT_TRUE(answers.empty());
  promise.set_value("all");
  invoke_once();
  EXPECT_EQ(answers, (std::vector<std::string>{"all", "all", "all"}));
}

TEST(FunctionTest, SignaturesAreWords) {
  const auto all = all_signatures();
  EXPECT_EQ(all.at("scaled"), "(Tensor, float64) -> Tensor");
  EXPECT_EQ(all.at("count_call"), "() -> void");
  EXPECT_EQ(all.at("words"), "(string, optional<int32>) -> vector<string>");
  EXPECT_EQ(all.at("longest"), "(vector<string>) -> string");
}

TEST(FunctionTest, UnknownNamesAreErrors) {
  COHORT_EXPECT_THROW_WITH(find_function("scalde"), UsageError, "there is no remote function 'scalde'");
  COHORT_EXPECT_THROW_WITH(name_of<unknown>(), UsageError,
                           "(int32) -> int32 is called that is not registered");
}

TEST(FunctionTest, AFunctionStaysWhereItIs) {
  const RemoteFunction* const found = &find_function("scaled");
  EXPECT_EQ(&find_function("scaled"), found) << "no call copies it";
  EXPECT_NE(&find_function("words"), found);
}

TEST(FunctionTest, DifferencesShowBothSignatures) {
  EXPECT_EQ(differences({{"a", "() -> void"}, {"b", "(int32) -> void"}, {"c", "() -> void"}, {"e", "()"}},
                        {{"a", "() -> void"}, {"b", "(int64) -> void"}, {"d", "() -> void"}, {"e", "(e)"}}),
            "b: here (int32) -> void, there (int64) -> void; e: here (), there (e)");
  EXPECT_EQ(differences(all_signatures(), all_signatures()), "");
}

TEST(FunctionTest, ArgumentsOfAnotherSignatureAreAnError) {
  COHORT_EXPECT_THROW_WITH(invoke("scaled", encode_arguments<words>("abc", 1)), CommError, "[rpc.decode]");
}

}  // namespace
}  // namespace cohort::rpc
