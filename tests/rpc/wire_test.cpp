#include "cohort/rpc/internal/wire.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::rpc {
namespace {

// As a node does: the payloads come in memory of their own.
Encoded received(net::Message message) {
  for (net::Payload& payload : message.payloads) {
    const std::shared_ptr<std::byte> memory(new std::byte[payload.bytes.size() + 1],
                                            std::default_delete<std::byte[]>());
    std::copy(payload.bytes.begin(), payload.bytes.end(), memory.get());
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

TEST(WireTest, ATensorWithoutGapsKeepsItsStrides) {
  const at::Tensor values = at::arange(120, at::kFloat).view({2, 3, 4, 5});
  const std::vector<at::Tensor> sent{values.contiguous(at::MemoryFormat::ChannelsLast),
                                     values.permute({3, 0, 2, 1}),
                                     values[0][0].t(),
                                     values.slice(1, 1, 3),
                                     values.view({2, 1, 60}).transpose(0, 2),
                                     at::zeros({0, 3}).t()};
  for (const Memory memory : {Memory::kShared, Memory::kOwn}) {
    const net::Message message = to_message(0, {"", sent}, memory);
    EXPECT_EQ(message.payloads[1].bytes.data() == static_cast<const std::byte*>(values.const_data_ptr()),
              memory == Memory::kShared);
    const Encoded came = received(message);
    for (std::size_t i = 0; i < sent.size(); ++i) {
      EXPECT_TRUE(at::equal(came.tensors[i], sent[i])) << i;
      EXPECT_EQ(came.tensors[i].is_contiguous(), sent[i].is_contiguous() || i == 3) << i;
      if (i < 3) EXPECT_EQ(came.tensors[i].strides(), sent[i].strides()) << i;
    }
    EXPECT_TRUE(came.tensors[0].is_contiguous(at::MemoryFormat::ChannelsLast));
  }
}

TEST(WireTest, AnyStrideOfADimensionOfSizeOneTravels) {
  const at::Tensor values =
      at::arange(24, at::kFloat).view({1, 2, 3, 4}).contiguous(at::MemoryFormat::ChannelsLast);
  for (const std::int64_t stride : {std::int64_t{1} << 50, std::int64_t{0}}) {
    const at::Tensor sent = values.as_strided({1, 2, 3, 4}, {stride, 1, 8, 2});
    EXPECT_TRUE(at::equal(received(to_message(0, {"", {sent}})).tensors[0], sent)) << stride;
  }
}

TEST(WireTest, StridesThatOverlapOrLeaveGapsAreAnError) {
  // References, tensors, type, flags, dimensions, two sizes, two strides.
  const auto error_of = [](char first, char second) {
    net::Message message = to_message(0, {"", {at::ones({3, 2}).t()}});
    add_references(message, {});
    EXPECT_EQ(message.header.substr(5, 4), (std::string{2, 3, 1, 2}));
    message.header[7] = first;
    message.header[8] = second;
    try {
      to_encoded(message);
    } catch (const CommError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  EXPECT_EQ(error_of(1, 2), "none");
  EXPECT_EQ(error_of(3, 1), "none");
  for (const auto& [first, second] :
       std::vector<std::pair<char, char>>{{1, 1}, {1, 3}, {2, 1}, {0, 0}, {4, 1}}) {
    EXPECT_NE(error_of(first, second).find("came with strides"), std::string::npos)
        << int{first} << int{second};
  }
}

// Three entries, of which two are the same, in a tensor of 4 x 3 x 2.
at::Tensor three_entries(const at::Tensor& values, std::int64_t num_sparse) {
  const at::Tensor indices = at::tensor({3, 0, 3, 2, 1, 2}, at::kLong).view({2, 3});
  return at::sparse_coo_tensor(indices.slice(0, 0, num_sparse), values, {4, 3, 2});
}

TEST(WireTest, SparseTensorsArriveAsTheyWere) {
  const at::Tensor rows = three_entries(at::arange(6, at::kDouble).view({3, 2}), 2),
                   matrices = three_entries(at::arange(18, at::kFloat).view({3, 3, 2}), 1),
                   complex = three_entries(at::arange(6).to(at::kComplexFloat).view({3, 2}), 2),
                   empty = at::zeros({5, 0, 2}, at::kLong).to_sparse();
  const std::vector<at::Tensor> all{rows, rows.coalesce(), rows.transpose(0, 1), complex, matrices, empty};
  for (const Memory memory : {Memory::kShared, Memory::kOwn}) {
    const Encoded came = received(to_message(0, {"abc", all}, memory));
    EXPECT_EQ(came.bytes, "abc");
    ASSERT_EQ(came.tensors.size(), all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      const at::Tensor &sent = all[i], &tensor = came.tensors[i];
      ASSERT_TRUE(tensor.is_sparse()) << i;
      EXPECT_EQ(tensor.is_coalesced(), sent.is_coalesced()) << i;
      EXPECT_EQ(tensor.sizes(), sent.sizes()) << i;
      EXPECT_TRUE(at::equal(tensor._indices(), sent._indices())) << i;
      EXPECT_TRUE(at::equal(tensor._values(), sent._values())) << i;
    }
  }
}

TEST(WireTest, ASparseTensorMayRequireGradAndIsNotCopied) {
  const at::Tensor sparse = three_entries(at::ones({3, 2}), 2).requires_grad_();
  const net::Message message = to_message(0, {"", {sparse, at::ones({2})}});
  ASSERT_EQ(message.payloads.size(), 3U);
  EXPECT_EQ(message.payloads[1].bytes.data(),
            static_cast<const std::byte*>(sparse._values().const_data_ptr()));
  const net::Message own = to_message(0, {"", {sparse}}, Memory::kOwn);
  EXPECT_NE(own.payloads[1].bytes.data(), message.payloads[1].bytes.data());
  const Encoded came = received(message);
  EXPECT_TRUE(came.tensors[0].requires_grad());
  EXPECT_TRUE(came.tensors[0].is_leaf());
  EXPECT_FALSE(came.tensors[1].requires_grad());
}

TEST(WireTest, WhatNoSenderWritesOfASparseTensorIsAnError) {
  const auto error_of = [](const std::function<void(net::Message&)>& change) {
    net::Message message =
        to_message(0, {"", {three_entries(at::arange(6, at::kFloat).view({3, 2}), 2).coalesce()}});
    add_references(message, {});
    change(message);
    try {
      to_encoded(message);
    } catch (const CommError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  // References, tensors, type, flags, dimensions, three sizes, sparse dimensions, entries.
  EXPECT_EQ(error_of([](net::Message&) {}), "none");
  EXPECT_NE(error_of([](net::Message& m) { m.header[3] = 16; }).find("an unknown flag"), std::string::npos);
  EXPECT_NE(error_of([](net::Message& m) { m.header[3] = 10; }).find("an unknown flag"), std::string::npos)
      << "a sparse tensor has no strides";
  EXPECT_NE(error_of([](net::Message& m) { m.header[5] = 3; }).find("has index 3 in a dimension of size 3"),
            std::string::npos);
  EXPECT_NE(error_of([](net::Message& m) { m.header[8] = 4; }).find("4 of 3 dimensions"), std::string::npos);
  EXPECT_NE(error_of([](net::Message& m) { m.header[9] = 7; }).find("14 elements came with 32 bytes"),
            std::string::npos);
  EXPECT_NE(error_of([](net::Message& m) { m.payloads.pop_back(); }).find("more tensors are said to come"),
            std::string::npos);
  EXPECT_NE(error_of([](net::Message& m) { m.payloads.push_back(m.payloads[0]); }).find("3 payloads came"),
            std::string::npos);
}

// LibTorch's kernels for what is coalesced rely on the order of the entries.
TEST(WireTest, EntriesThatAreOnlySaidToBeInTheirOrderCountAsTheyAre) {
  const at::Tensor sparse = three_entries(at::arange(6, at::kFloat).view({3, 2}), 2)._coalesced_(true);
  const Encoded came = received(to_message(0, {"", {sparse}}));
  EXPECT_FALSE(came.tensors[0].is_coalesced());
  EXPECT_EQ(came.tensors[0].to_dense().sum().item<float>(), 15);
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
  COHORT_EXPECT_THROW_WITH(to_message(0, {"", {at::eye(3).to_sparse_csr()}}), UsageError, "cannot travel");
  COHORT_EXPECT_THROW_WITH(to_message(0, {"", {at::empty({2}, at::TensorOptions(at::kMeta))}}), UsageError,
                           "cannot travel");
  const at::Tensor outside = at::_sparse_coo_tensor_unsafe(at::full({1, 1}, 5, at::kLong), at::ones({1}), {3},
                                                           at::TensorOptions().layout(at::kSparse), false);
  COHORT_EXPECT_THROW_WITH(to_message(0, {"", {outside}}), UsageError,
                           "a sparse tensor has index 5 in a dimension of size 3");
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
  EXPECT_NE(error_of([](net::Message& m) { m.payloads.clear(); }).find("more tensors are said to come"),
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
  net::Message good = to_message(0, {"abc", {at::ones({2, 3}), at::eye(3).to_sparse(), at::ones({4})}});
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
