#include "cohort/rpc/codec.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <unordered_map>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::rpc {

enum class Colour : std::uint16_t { kRed = 1, kGreen = 700 };

struct Detection {
  at::Tensor boxes;
  std::vector<at::Tensor> masks;
  std::string name;
  std::optional<double> score;
};
COHORT_NESTED(Detection, boxes, masks, name, score)

struct Tree {
  std::int32_t value = 0;
  std::vector<Tree> children;
  std::unique_ptr<Tree> next;
};
COHORT_NESTED(Tree, value, children, next)

struct Nothing {};
COHORT_NESTED(Nothing)

class Fraction {
 public:
  Fraction(int above, int below) : above_(above), below_(below) {}
  double value() const { return static_cast<double>(above_) / below_; }

 private:
  friend struct Codec<Fraction>;
  int above_, below_;
};
template <>
struct Codec<Fraction> {
  static void write(Writer& out, const Fraction& fraction) {
    encode(out, std::pair(fraction.above_, fraction.below_));
  }
  static Fraction read(Reader& in) {
    const auto [above, below] = decode<std::pair<int, int>>(in);
    return {above, below};
  }
  static void describe(TypeText& text) { text.add("Fraction"); }
};

namespace {

template <typename T>
Encoded encoded(const T& value) {
  Writer out;
  encode(out, value);
  return out.take();
}

template <typename T>
T there_and_back(const T& value) {
  const Encoded bytes = encoded(value);
  Reader in(bytes);
  T result = decode<T>(in);
  in.finish();
  return result;
}

template <typename T>
std::string text_of() {
  TypeText text;
  describe<T>(text);
  return text.str();
}

template <typename T>
void expect_same(const T& value) {
  EXPECT_EQ(there_and_back(value), value) << text_of<T>();
}

TEST(CodecTest, NumbersKeepEachBit) {
  expect_same(true);
  expect_same(std::int8_t{-128});
  expect_same('x');
  expect_same(std::uint16_t{65535});
  expect_same(std::numeric_limits<std::int64_t>::min());
  expect_same(std::numeric_limits<std::uint64_t>::max());
  expect_same(-0.1F);
  expect_same(std::numeric_limits<double>::denorm_min());
  expect_same(std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::signbit(there_and_back(-0.0)));
  EXPECT_TRUE(std::isnan(there_and_back(std::nan(""))));
  expect_same(Colour::kGreen);
}

TEST(CodecTest, ContainersOfContainers) {
  expect_same(std::string());
  expect_same(std::string("a\0b\n\xff", 5));
  expect_same(std::vector<bool>{true, false, true});
  expect_same(std::vector<std::vector<std::string>>{{"a", ""}, {}, {std::string(300, 'x')}});
  expect_same(std::optional<std::vector<int>>());
  expect_same(std::optional<std::vector<int>>({1, 2}));
  expect_same(std::map<std::string, std::pair<int, double>>{{"a", {1, 0.5}}, {"b", {2, -1}}});
  expect_same(std::unordered_map<int, std::string>{{3, "c"}, {1, "a"}, {2, ""}});
  expect_same(std::tuple<int, std::string, std::optional<bool>>{1, "x", false});
  expect_same(std::tuple<>());
  expect_same(std::array<std::string, 3>{"a", "", "c"});
  expect_same(std::array<int, 0>());
  expect_same(std::variant<int, std::string, std::vector<int>>(std::string("text")));
  expect_same(std::variant<int, std::string, std::vector<int>>(std::vector<int>{1}));
}

TEST(CodecTest, TensorsAreNotCopied) {
  const at::Tensor x = at::arange(6).view({2, 3});
  const auto back = there_and_back(std::map<std::string, at::Tensor>{{"x", x}, {"none", at::Tensor()}});
  EXPECT_TRUE(back.at("x").is_same(x));
  EXPECT_FALSE(back.at("none").defined());
}

TEST(CodecTest, StructsTravelMemberByMember) {
  const at::Tensor boxes = at::ones({2, 4}), mask = at::zeros({5});
  const Detection back = there_and_back(Detection{boxes, {mask, at::Tensor(), mask}, "cat", 0.75});
  EXPECT_TRUE(back.boxes.is_same(boxes));
  ASSERT_EQ(back.masks.size(), 3U);
  EXPECT_TRUE(back.masks[2].is_same(mask));
  EXPECT_FALSE(back.masks[1].defined());
  EXPECT_EQ(back.name, "cat");
  EXPECT_EQ(back.score, 0.75);
}

TEST(CodecTest, StructsThatHoldThemselves) {
  Tree tree{1, {}, nullptr};
  tree.children.push_back({2, {}, nullptr});
  tree.children.back().children.push_back({3, {}, std::make_unique<Tree>(Tree{4, {}, nullptr})});
  const Tree back = there_and_back(tree);
  EXPECT_EQ(back.children.at(0).children.at(0).next->value, 4);
}

TEST(CodecTest, TypesOfOnesOwn) {
  EXPECT_EQ(there_and_back(Fraction(3, 4)).value(), 0.75);
  EXPECT_EQ(there_and_back(std::vector<Fraction>{{1, 2}, {7, 2}}).at(1).value(), 3.5);
}

TEST(CodecTest, TypesInWords) {
  EXPECT_EQ(text_of<std::int64_t>(), "int64");
  EXPECT_EQ(text_of<long long>(), "int64") << "as on the other machine";
  EXPECT_EQ(text_of<float>(), "float32");
  EXPECT_EQ(text_of<Colour>(), "enum uint16");
  EXPECT_EQ((text_of<std::map<std::string, std::vector<at::Tensor>>>()), "map<string, vector<Tensor>>");
  EXPECT_EQ((text_of<std::pair<int, bool>>()), (text_of<std::tuple<int, bool>>()));
  EXPECT_EQ((text_of<std::array<float, 3>>()), "array 3 <float32>");
  EXPECT_EQ(text_of<Detection>(),
            "{boxes: Tensor, masks: vector<Tensor>, name: string, score: optional<float64>}");
  EXPECT_EQ(text_of<Tree>(), "{value: int32, children: vector<struct 1>, next: optional<struct 1>}");
  EXPECT_EQ(text_of<Nothing>(), "{}");
  EXPECT_EQ(text_of<std::vector<Fraction>>(), "vector<Fraction>");
}

TEST(CodecTest, WhatDoesNotFitIsAnError) {
  const Encoded bytes = encoded(std::vector<std::string>{"a", "b"});
  const auto read = [](Encoded from) {
    Reader in(from);
    decode<std::vector<std::string>>(in);
    in.finish();
  };
  for (std::size_t size = 0; size < bytes.bytes.size(); ++size) {
    COHORT_EXPECT_THROW_WITH(read({bytes.bytes.substr(0, size), {}}), CommError, "[rpc.decode]");
  }
  COHORT_EXPECT_THROW_WITH(read({bytes.bytes + "x", {}}), CommError,
                           "1 bytes, 0 tensors and 0 references are left");
  COHORT_EXPECT_THROW_WITH(read({bytes.bytes, {at::ones({1})}}), CommError,
                           "0 bytes, 1 tensors and 0 references are left");
  COHORT_EXPECT_THROW_WITH(read({"\xff\xff\xff\xff\x7f", {}}), CommError, "34359738367 elements");
  COHORT_EXPECT_THROW_WITH(read({std::string(12, '\xff'), {}}), CommError, "more than 9 bytes");
  const Encoded none{std::string(1, '\1'), {}};
  Reader in(none);
  COHORT_EXPECT_THROW_WITH(decode<at::Tensor>(in), CommError, "more tensors");
  const Encoded other{std::string("\7\0\0\0\0", 5), {}};
  Reader alternatives(other);
  COHORT_EXPECT_THROW_WITH((decode<std::variant<int, bool>>(alternatives)), CommError,
                           "alternative 7 of a variant that has 2");
}

TEST(CodecTest, NestingHasALimit) {
  Tree deep{0, {}, nullptr};
  for (int i = 0; i < 150; ++i) {
    Tree outer{i, {}, nullptr};
    outer.children.push_back(std::move(deep));
    deep = std::move(outer);
  }
  COHORT_EXPECT_THROW_WITH(there_and_back(deep), CommError, "nested deeper than 200");
}

// Whatever bytes come, a value or an error comes out, and little memory is taken.
TEST(CodecTest, RandomBytesAreAValueOrAnError) {
  std::mt19937 random(7);
  using Any = std::variant<std::vector<std::string>, std::map<int, std::vector<bool>>, Tree,
                           std::optional<Detection>>;
  int values = 0, errors = 0;
  for (int i = 0; i < 20'000; ++i) {
    Encoded bytes{std::string(random() % 40, '\0'), {}};
    for (char& byte : bytes.bytes) byte = static_cast<char>(random() % (random() % 2 == 0 ? 4 : 256));
    Reader in(bytes);
    try {
      decode<Any>(in);
      ++values;
    } catch (const CommError&) {
      ++errors;
    }
  }
  EXPECT_GT(values, 500);
  EXPECT_GT(errors, 500);
}

}  // namespace
}  // namespace cohort::rpc
