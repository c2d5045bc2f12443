#include "cohort/rpc/internal/wire.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

// As a node does: the payloads come in memory of their own.
Encoded received(net::Message message) {
  for (net::Payload& payload : message.payloads) {
    const std::shared_ptr<std::byte> memory(new std::byte[payload.bytes.size() + 1],
                                            std::default_delete<std::byte[]>());
    std::memcpy(memory.get(), payload.bytes.data(), payload.bytes.size());
    payload = {memory, {memory.get(), payload.bytes.size()}};
  }
  add_references(message, {});
  return to_encoded(message).first;
}

TEST(WireTest, TensorsOfEachTypeAndShapeArriveAsTheyWere) {
  for (const at::ScalarType type :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
        at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    const at::Tensor values = at::arange(24).to(type).view({2, 3, 4});
    Encoded sent{"values",
                 {values, values.transpose(0, 2), values[1][2][3], values.slice(1, 1, 1),
                  values.expand({5, 2, 3, 4})}};
    const net::Message message = to_message(7, sent);
    EXPECT_EQ(message.channel, 7U);
    EXPECT_EQ(message.payloads[0].bytes.data(), static_cast<const std::byte*>(values.const_data_ptr()))
        << "not copied";
    const Encoded came = received(message);
    EXPECT_EQ(came.bytes, "values");
    ASSERT_EQ(came.tensors.size(), 5U);
    for (std::size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(came.tensors[i].scalar_type(), type);
      EXPECT_TRUE(at::equal(came.tensors[i], sent.tensors[i])) << type << ' ' << i;
    }
  }
  const at::Tensor complex = at::randn({3}, at::kComplexFloat);
  EXPECT_TRUE(
      at::equal(received(to_message(0, {"", {complex.conj()}})).tensors[0], complex.conj().resolve_conj()));
}

TEST(WireTest, ALeafThatRequiresGradStaysOne) {
  const at::Tensor leaf = at::ones({2}).requires_grad_(), inner = leaf * 2;
  const Encoded came = received(to_message(0, {"", {leaf, inner}}));
  EXPECT_TRUE(came.tensors[0].requires_grad());
  EXPECT_FALSE(came.tensors[1].requires_grad());
}

TEST(WireTest, MemoryLivesAsLongAsTheTensor) {
  net::Message message = to_message(0, {"", {at::arange(5)}});
  add_references(message, {});
  const std::weak_ptr<const void> memory = message.payloads[0].owner;
  at::Tensor tensor = to_encoded(message).first.tensors[0];
  message = {};
  EXPECT_FALSE(memory.expired());
  EXPECT_EQ(tensor.sum().item<int>(), 10);
  tensor.reset();
  EXPECT_TRUE(memory.expired());
}

TEST(WireTest, ReferencesArriveAsTheyWere) {
  net::Message message = to_message(0, {"abc", {at::ones({2})}});
  add_references(message, {{{1, 1ULL << 40}, 3, {4, 5}}, {{-1, 2}, 0, {0, 6}}});
  const auto [value, references] = to_encoded(message);
  EXPECT_EQ(value.bytes, "abc");
  EXPECT_EQ(value.tensors.size(), 1U);
  ASSERT_EQ(references.size(), 2U);
  EXPECT_EQ(references[0].object, (ObjectId{1, 1ULL << 40}));
  EXPECT_EQ(references[0].owner, 3);
  EXPECT_EQ(references[0].fork, (ForkId{4, 5}));
  EXPECT_EQ(references[1].object, (ObjectId{-1, 2}));
  EXPECT_EQ(references[1].fork, (ForkId{0, 6}));
}

TEST(WireTest, WhatCannotTravelIsAnErrorAtTheSender) {
  COHORT_EXPECT_THROW_WITH(to_message(0, {"", {at::eye(3).to_sparse()}}), UsageError, "cannot travel");
  COHORT_EXPECT_THROW_WITH(to_message(0, {"", {at::empty({2}, at::TensorOptions(at::kMeta))}}), UsageError,
                           "cannot travel");
}

TEST(WireTest, WhatNoSenderWritesIsAnError) {
  net::Message good = to_message(0, {"abc", {at::ones({2, 3})}});
  add_references(good, {});
  const auto error_of = [&](const std::function<void(net::Message&)>& change) {
    net::Message message = good;
    change(message);
    try {
      to_encoded(message);
    } catch (const CommError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  EXPECT_EQ(error_of([](net::Message&) {}), "none");
  EXPECT_NE(error_of([](net::Message& m) { m.payloads.clear(); }).find("1 tensors are said"),
            std::string::npos);
  EXPECT_NE(error_of([](net::Message& m) {
              m.payloads[0].bytes = m.payloads[0].bytes.first(5);
            }).find("came with 5 bytes"),
            std::string::npos);
  EXPECT_NE(error_of([](net::Message& m) { m.header[2] = 99; }).find("elements of type 99"),
            std::string::npos);
  EXPECT_NE(error_of([](net::Message& m) { m.header[4] = 100; }).find("elements are said"),
            std::string::npos);
  EXPECT_NE(error_of([](net::Message& m) { m.header.clear(); }).find("[rpc.decode]"), std::string::npos);
  // Sizes whose product is beyond any memory.
  net::Message huge = good;
  huge.header =
      std::string("\0\1\6\0\2", 5) + std::string(8, '\xff') + "\x7f" + std::string(8, '\xff') + "\x7f";
  COHORT_EXPECT_THROW_WITH(to_encoded(huge), CommError, "more elements than memory");
}

TEST(WireTest, RandomHeadersAreTensorsOrAnError) {
  std::mt19937 random(2);
  net::Message good = to_message(0, {"abc", {at::ones({2, 3}), at::ones({4})}});
  add_references(good, {{{1, 2}, 3, {4, 5}}});
  for (int i = 0; i < 20'000; ++i) {
    net::Message message = good;
    for (std::size_t flips = 1 + random() % 3; flips > 0; --flips) {
      message.header[random() % message.header.size()] =
          static_cast<char>(random() % (random() % 2 == 0 ? 8 : 256));
    }
    try {
      for (const at::Tensor& tensor : to_encoded(message).first.tensors) tensor.to(at::kDouble).sum();
    } catch (const CommError&) {
    }
  }
}

}  // namespace
}  // namespace cohort::rpc
