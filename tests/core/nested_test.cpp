#include "cohort/core/nested.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace users {

enum class Mode { kTrain, kTest };

struct Detection {
  at::Tensor boxes;
  std::vector<at::Tensor> masks;
  std::string name;
  Mode kind = Mode::kTrain;
};
COHORT_NESTED(Detection, boxes, masks, name, kind)

struct Base {
  at::Tensor input;
};
struct Tree : Base {
  std::optional<at::Tensor> label;
  std::vector<Tree> children;
};
COHORT_NESTED(Tree, input, label, children)

struct Owner {
  std::unique_ptr<at::Tensor> tensor;
};
COHORT_NESTED(Owner, tensor)

// Listed by hand, with a member that is private.
class Hidden {
 public:
  explicit Hidden(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  const at::Tensor& tensor() const { return tensor_; }

 private:
  friend struct cohort::core::NestedTraits<Hidden>;
  at::Tensor tensor_;
};

struct Settings {
  std::function<void()> callback;
};

}  // namespace users

template <>
struct cohort::core::NestedTraits<users::Hidden> {
  static auto fields() { return std::make_tuple(NestedField{"tensor", &users::Hidden::tensor_}); }
};
template <>
struct cohort::core::NestedTraits<users::Settings> {
  static constexpr bool plain = true;
};

namespace cohort::core {
namespace {

at::Tensor number(double value) {
  return at::full({}, value);
}

// The numbers of all tensors, in visiting order.
template <typename T>
std::vector<double> numbers(const T& value) {
  std::vector<double> found;
  visit_tensors(value, [&](const at::Tensor& tensor) { found.push_back(tensor.item<double>()); });
  return found;
}

template <typename T>
std::vector<std::string> paths(const T& value) {
  std::vector<std::string> found;
  visit_tensors(value, [&](const at::Tensor&, const NestedPath& path) { found.push_back(path.str()); });
  return found;
}

using Numbers = std::vector<double>;
using Paths = std::vector<std::string>;

TEST(NestedTest, VisitsATensorAlone) {
  EXPECT_EQ(numbers(number(1)), Numbers{1});
  EXPECT_EQ(paths(number(1)), Paths{""});
}

TEST(NestedTest, VisitsEveryContainerInTheOrderWritten) {
  EXPECT_EQ(numbers(std::vector<at::Tensor>{number(1), number(2)}), (Numbers{1, 2}));
  EXPECT_EQ(numbers(std::array<at::Tensor, 2>{number(1), number(2)}), (Numbers{1, 2}));
  EXPECT_EQ(numbers(std::make_pair(number(1), number(2))), (Numbers{1, 2}));
  EXPECT_EQ(numbers(std::make_tuple(number(1), 7, number(2), std::string("x"))), (Numbers{1, 2}));
  EXPECT_EQ(numbers(std::optional<at::Tensor>(number(1))), Numbers{1});
  EXPECT_EQ(numbers(std::optional<at::Tensor>()), Numbers{});
  EXPECT_EQ(numbers(std::map<std::string, at::Tensor>{{"b", number(2)}, {"a", number(1)}}), (Numbers{1, 2}));
  EXPECT_EQ(numbers(std::variant<int, at::Tensor>(number(1))), Numbers{1});
  EXPECT_EQ(numbers(std::variant<int, at::Tensor>(3)), Numbers{});
}

TEST(NestedTest, UnorderedMapsAreVisitedInTheOrderOfTheirKeys) {
  std::unordered_map<int, at::Tensor> map;
  Numbers expected;
  for (int key = 99; key >= 0; --key) map[key * 7919 % 1000] = number(key * 7919 % 1000);
  for (const auto& [key, tensor] : std::map<int, at::Tensor>(map.begin(), map.end())) expected.push_back(key);
  EXPECT_EQ(numbers(map), expected);
}

TEST(NestedTest, VisitsStructsWithPathsThatNameTheirMembers) {
  const users::Detection detection{number(1), {number(2), number(3)}, "cat"};
  EXPECT_EQ(numbers(detection), (Numbers{1, 2, 3}));
  EXPECT_EQ(paths(detection), (Paths{".boxes", ".masks[0]", ".masks[1]"}));
  const std::map<std::string, std::tuple<int, std::vector<users::Detection>>> deep{
      {"left", {1, {detection}}}};
  EXPECT_EQ(paths(deep).at(1), "[left][1][0].masks[0]");
}

TEST(NestedTest, VisitsStructsThatHoldThemselvesAndInheritedMembers) {
  users::Tree tree{{number(1)}, std::nullopt, {}};
  tree.children.push_back({{number(2)}, number(3), {}});
  EXPECT_EQ(numbers(tree), (Numbers{1, 2, 3}));
  EXPECT_EQ(paths(tree).at(2), ".children[0].label");
}

TEST(NestedTest, VisitsStructsListedByHand) {
  users::Hidden hidden(number(4));
  EXPECT_EQ(numbers(hidden), Numbers{4});
  EXPECT_EQ(map_tensors(hidden, [](const at::Tensor& t) { return t + 1; }).tensor().item<double>(), 5);
}

TEST(NestedTest, ConstValuesGiveConstTensorsAndOthersMayBeAssigned) {
  users::Tree tree{{number(1)}, number(2), {}};
  visit_tensors(tree, [](auto& tensor) {
    static_assert(std::is_same_v<decltype(tensor), at::Tensor&>);
    tensor = tensor * 10;
  });
  EXPECT_EQ(numbers(tree), (Numbers{10, 20}));
  const users::Owner owner{std::make_unique<at::Tensor>(number(3))};
  visit_tensors(owner, [](auto& tensor) {
    static_assert(std::is_same_v<decltype(tensor), const at::Tensor&>, "a pointer keeps constness");
  });
}

TEST(NestedTest, UndefinedTensorsAreVisitedToo) {
  int visited = 0;
  visit_tensors(std::vector<at::Tensor>(2), [&](const at::Tensor& tensor) {
    EXPECT_FALSE(tensor.defined());
    ++visited;
  });
  EXPECT_EQ(visited, 2);
}

TEST(NestedTest, MapReplacesTensorsAndCarriesTheRestAlong) {
  const users::Detection detection{number(1), {number(2)}, "cat", users::Mode::kTest};
  const users::Detection mapped = map_tensors(detection, [](const at::Tensor& t) { return t + 10; });
  EXPECT_EQ(numbers(mapped), (Numbers{11, 12}));
  EXPECT_EQ(mapped.name, "cat");
  EXPECT_EQ(mapped.kind, users::Mode::kTest);
  EXPECT_EQ(numbers(detection), (Numbers{1, 2})) << "the original stays";
  Paths seen;
  map_tensors(detection, [&](const at::Tensor& t, const NestedPath& path) {
    seen.push_back(path.str());
    return t;
  });
  EXPECT_EQ(seen, (Paths{".boxes", ".masks[0]"}));
}

TEST(NestedTest, MapMovesWhatCannotBeCopied) {
  users::Owner owner{std::make_unique<at::Tensor>(number(3))};
  const at::Tensor* where = owner.tensor.get();
  const users::Owner mapped = map_tensors(std::move(owner), [](const at::Tensor& t) { return t * 2; });
  EXPECT_EQ(mapped.tensor.get(), where);
  EXPECT_EQ(numbers(mapped), Numbers{6});
}

TEST(NestedTest, TypesWithoutTensorsPassThroughWhole) {
  const std::tuple<at::Tensor, std::vector<bool>, users::Settings> value{number(1), {true, false}, {}};
  const auto mapped = map_tensors(value, [](const at::Tensor& t) { return t + 1; });
  EXPECT_EQ(std::get<1>(mapped), (std::vector<bool>{true, false}));
  EXPECT_EQ(numbers(mapped), Numbers{2});
}

TEST(NestedTest, ToDeviceMovesDefinedTensorsAndSharesThoseThatAreThere) {
  std::map<std::string, std::optional<at::Tensor>> value{
      {"a", number(1)}, {"b", std::nullopt}, {"c", at::Tensor()}};
  const auto same = to_device(value, at::kCPU);
  EXPECT_TRUE(same.at("a")->is_same(*value.at("a")));
  EXPECT_FALSE(same.at("c")->defined());
  const auto moved = to_device(value, at::kMeta);
  EXPECT_EQ(moved.at("a")->device(), at::kMeta);
  EXPECT_EQ(value.at("a")->device(), at::kCPU);
  EXPECT_FALSE(moved.at("b").has_value());
}

TEST(NestedTest, ZipVisitsEqualStructuresSideBySide) {
  const users::Detection from{number(1), {number(2), number(3)}, "a"};
  users::Detection to{number(0), {number(0), number(0)}, "b"};
  Paths seen;
  zip_tensors(to, from, [&](at::Tensor& target, const at::Tensor& source, const NestedPath& path) {
    target.copy_(source);
    seen.push_back(path.str());
  });
  EXPECT_EQ(numbers(to), (Numbers{1, 2, 3}));
  EXPECT_EQ(seen, (Paths{".boxes", ".masks[0]", ".masks[1]"}));
  const std::variant<int, at::Tensor> a(number(1));
  int pairs = 0;
  zip_tensors(a, a, [&](const at::Tensor&, const at::Tensor&) { ++pairs; });
  EXPECT_EQ(pairs, 1);
}

template <typename T>
void zip_nothing(const T& a, const T& b) {
  zip_tensors(a, b, [](const at::Tensor&, const at::Tensor&) {});
}

TEST(NestedTest, ZipSaysWhereTwoStructuresDiffer) {
  COHORT_EXPECT_THROW_WITH(
      zip_nothing(users::Detection{number(1), {number(2)}, ""}, users::Detection{number(1), {}, ""}),
      UsageError, "differ at .masks: the first has 1 elements, the second 0. Try: ");
  using Optional = std::optional<at::Tensor>;
  COHORT_EXPECT_THROW_WITH(zip_nothing(Optional(number(1)), Optional()), UsageError,
                           "differ at the top: the first has a value, the second none");
  using Map = std::map<std::string, at::Tensor>;
  COHORT_EXPECT_THROW_WITH((zip_nothing(Map{{"a", number(1)}}, Map{{"b", number(1)}})), UsageError,
                           "differ at [a]: the first has this key, the second no such key");
  COHORT_EXPECT_THROW_WITH((zip_nothing(Map{{"a", number(1)}}, Map{})), UsageError,
                           "the first has 1 keys, the second 0");
  using Variant = std::variant<int, at::Tensor>;
  COHORT_EXPECT_THROW_WITH(zip_nothing(Variant(1), Variant(number(1))), UsageError,
                           "has alternative 0, the second 1");
}

TEST(NestedTest, FlattenAndUnflattenAreInverse) {
  const users::Detection detection{number(1), {number(2), number(3)}, "cat"};
  const std::vector<at::Tensor> flat = flatten_tensors(detection);
  ASSERT_EQ(flat.size(), 3u);
  EXPECT_TRUE(flat[1].is_same(detection.masks[0]));
  const std::vector<at::Tensor> other = {number(4), number(5), number(6)};
  const users::Detection back = unflatten_tensors(detection, other);
  EXPECT_EQ(numbers(back), (Numbers{4, 5, 6}));
  EXPECT_EQ(back.name, "cat");
  COHORT_EXPECT_THROW_WITH(unflatten_tensors(detection, std::span(other).first(2)), UsageError,
                           "got 2 tensors, expected 3");
}

}  // namespace
}  // namespace cohort::core
