#include "cohort/script/internal/record/recorder.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

namespace cohort::script {
namespace {

bool key_is_on(c10::DispatchKey key) {
  return c10::impl::tls_is_dispatch_key_included(key);
}

std::string names(const Tape& tape) {
  std::string text;
  for (const OperatorCall& call : tape.calls()) text += call.name() + " ";
  return text;
}

at::Tensor loss_of(const at::Tensor& weight, const at::Tensor& x) {
  return at::relu(at::mm(x, weight)).sum();
}

void record_step(Tape& tape, RecorderKey key) {
  const at::Tensor x = at::ones({2, 3}), weight = at::ones({3, 4}).requires_grad_();
  tape.add_input(x);
  const Recording recording(tape, key);
  loss_of(weight, x).backward();
}

TEST(RecorderTest, SeesOperatorsBelowAutogradAndThoseOfBackward) {
  Tape tape;
  record_step(tape, RecorderKey::kAuto);
  EXPECT_TRUE(tape.unsupported_reason().empty()) << tape.unsupported_reason();
  const std::string found = names(tape);
  EXPECT_EQ(found.find("aten::mm aten::relu aten::sum"), 0U) << found;
  EXPECT_NE(found.find("aten::threshold_backward"), std::string::npos) << found;
}

TEST(RecorderTest, TheSecondKeySeesWhatTheFirstSees) {
  Tape first, second;
  record_step(first, RecorderKey::kAuto);
  record_step(second, RecorderKey::kSecond);
  EXPECT_EQ(names(first), names(second));
  EXPECT_EQ(first.str(), second.str());
}

TEST(RecorderTest, LeavesNothingBehindWhenTheFunctionThrows) {
  for (const RecorderKey key : {RecorderKey::kAuto, RecorderKey::kSecond}) {
    Tape tape;
    EXPECT_THROW(
        {
          const Recording recording(tape, key);
          at::mm(at::ones({2, 3}), at::ones({2, 3}));
        },
        c10::Error);
    EXPECT_FALSE(Recording::is_active());
    EXPECT_FALSE(key_is_on(c10::DispatchKey::Fake));
    EXPECT_FALSE(key_is_on(c10::DispatchKey::FuncTorchDynamicLayerBackMode));
    const std::size_t calls = tape.calls().size();
    at::ones({2}).add_(1);
    EXPECT_EQ(tape.calls().size(), calls);
  }
}

TEST(RecorderTest, NestedRecordingsHaveTheirOwnOperators) {
  Tape outer, inner;
  {
    const Recording recording(outer);
    const at::Tensor x = at::ones({2});
    {
      const Recording nested_recording(inner);
      x.mul(x);
    }
    EXPECT_TRUE(Recording::is_active());
    x.add(x);
  }
  EXPECT_EQ(names(inner), "aten::mul.Tensor ");
  EXPECT_EQ(names(outer).find("mul"), std::string::npos);
  EXPECT_NE(names(outer).find("aten::add.Tensor"), std::string::npos);
}

TEST(RecorderTest, RejectsNumbersHandedToCppAndSizesThatDependOnValuesByName) {
  const auto rejection_of = [](const std::function<void(const at::Tensor&)>& body) {
    Tape tape;
    const at::Tensor x = at::ones({3});
    tape.add_input(x);
    {
      const Recording recording(tape);
      body(x);
    }
    return tape.unsupported_reason();
  };
  EXPECT_NE(rejection_of([](const at::Tensor& x) { x.sum().item<float>(); }).find("_local_scalar_dense"),
            std::string::npos);
  EXPECT_NE(rejection_of([](const at::Tensor& x) { x.nonzero(); }).find("aten::nonzero"), std::string::npos);
  EXPECT_NE(rejection_of([](const at::Tensor& x) { x.masked_select(x > 0); }).find("aten::masked_select"),
            std::string::npos);
  EXPECT_NE(rejection_of([](const at::Tensor& x) { at::equal(x, x + 1); }).find("aten::equal"),
            std::string::npos);
  EXPECT_NE(rejection_of([](const at::Tensor& x) { x.to_sparse().mul(2); }).find("layout Sparse"),
            std::string::npos);
  EXPECT_EQ(rejection_of([](const at::Tensor& x) { x.mul(2); }), "");
  EXPECT_EQ(rejection_of([](const at::Tensor& x) { at::equal(x, x.detach()); }), "");
}

TEST(RecorderTest, NamesTheOperatorAndTheScalarThatDiffers) {
  const auto record = [](double factor) {
    Tape tape;
    const at::Tensor x = at::ones({3});
    tape.add_input(x);
    const Recording recording(tape);
    at::add(x, x, factor);
    return tape;
  };
  Tape first = record(2), second = record(3), third = record(3);
  const std::string found = second.difference(first);
  EXPECT_NE(found.find("'alpha' of aten::add.Tensor was 2"), std::string::npos) << found;
  EXPECT_NE(found.find("then 3"), std::string::npos) << found;
  EXPECT_EQ(third.difference(second), "");
}

TEST(RecorderTest, OperatorsOfAnotherThreadMakeTheTapeReject) {
  Tape tape;
  {
    const Recording recording(tape);
    const at::ThreadLocalState state;
    std::thread([&] {
      const at::ThreadLocalStateGuard guard(state);
      at::ones({2}).add(1);
    }).join();
  }
  EXPECT_NE(tape.unsupported_reason().find("another thread"), std::string::npos) << tape.unsupported_reason();
}

}  // namespace
}  // namespace cohort::script
