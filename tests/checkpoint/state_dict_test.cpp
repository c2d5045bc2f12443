#include "cohort/checkpoint/state_dict.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "cohort/base/error.h"
#include "tests/support/throws.h"

namespace cohort::checkpoint {
namespace {

namespace nn = torch::nn;

nn::Sequential make_net(int64_t classes = 5) {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).bias(false)), nn::BatchNorm2d(4),
                        nn::Linear(4, classes));
}

std::vector<std::string> names_of(const TensorMap& tensors) {
  std::vector<std::string> names;
  for (const auto& item : tensors) names.push_back(item.first);
  return names;
}

TEST(StateDictTest, NamesComeInPyTorchsOrder) {
  EXPECT_EQ(names_of(module_state(*make_net())),
            (std::vector<std::string>{"0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var",
                                      "1.num_batches_tracked", "2.weight", "2.bias"}));
}

TEST(StateDictTest, StateAliasesTheModule) {
  auto net = make_net();
  const TensorMap state = module_state(*net);
  EXPECT_FALSE(state[0].second.requires_grad());
  state[0].second.fill_(3);
  EXPECT_EQ(net->parameters()[0].mean().item<float>(), 3);
}

TEST(StateDictTest, ModuleRegisteredTwiceComesUnderBothNames) {
  nn::Linear shared(2, 2);
  nn::Sequential net(shared, shared);
  const TensorMap state = module_state(*net);
  EXPECT_EQ(names_of(state), (std::vector<std::string>{"0.weight", "0.bias", "1.weight", "1.bias"}));
  load_module_state(*net, state);
}

TEST(StateDictTest, LoadingConvertsDtypeInPlaceAndKeepsTheMemoryFormat) {
  auto from = make_net();
  auto to = make_net();
  TensorMap state = module_state(*from);
  for (auto& [name, tensor] : state) {
    if (tensor.is_floating_point()) tensor = tensor.to(at::kBFloat16);
  }
  at::Tensor weight = to->parameters()[0];
  weight.set_data(weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
  const void* address = weight.const_data_ptr();
  load_module_state(*to, state);
  EXPECT_EQ(weight.const_data_ptr(), address);
  EXPECT_EQ(weight.scalar_type(), at::kFloat);
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_TRUE(weight.is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_TRUE(at::equal(weight, state[0].second.to(at::kFloat)));
}

TEST(StateDictTest, StateOfAnotherModelIsRejectedWithEveryKindOfDifferenceAndChangesNothing) {
  auto net = make_net(5);
  TensorMap state = module_state(*make_net(7));
  state.erase(state.begin() + 3);
  state[1].second = at::ones({4}, at::kComplexFloat);
  state.emplace_back("9.extra", at::ones({1}));
  const at::Tensor before = net->parameters()[0].clone();
  const auto load = [&] { load_module_state(*net, state); };
  COHORT_EXPECT_THROW_WITH(load(), DataError,
                           "1 missing: 1.running_mean; 1 unexpected: 9.extra; 3 differing: ");
  COHORT_EXPECT_THROW_WITH(load(), DataError, "2.weight (got Float [7, 4], expected Float [5, 4])");
  COHORT_EXPECT_THROW_WITH(load(), DataError, "1.weight (got ComplexFloat [4], expected Float [4])");
  EXPECT_TRUE(at::equal(net->parameters()[0], before));
}

TEST(StateDictTest, LongListsOfDifferencesAreCut) {
  nn::Sequential net;
  for (int i = 0; i < 50; ++i) net->push_back(nn::Linear(1, 1));
  COHORT_EXPECT_THROW_WITH(load_module_state(*net, {}), DataError, "100 missing: 0.weight, 0.bias, 1.weight");
  COHORT_EXPECT_THROW_WITH(load_module_state(*net, {}), DataError, "4.bias and 90 more");
}

TEST(StateDictTest, PartialLoadCopiesWhatFitsAndSaysWhatDoesNot) {
  auto net = make_net(5);
  const TensorMap state = module_state(*make_net(7));
  const StateDifference difference = load_partial(*net, state);
  EXPECT_EQ(difference.differing.size(), 2u);
  EXPECT_TRUE(difference.missing.empty() && difference.unexpected.empty());
  EXPECT_TRUE(at::equal(net->parameters()[0], state[0].second));
}

TEST(StateDictTest, MetaModuleIsRejected) {
  struct MetaModule : nn::Module {
    MetaModule() { register_parameter("weight", at::empty({2}, at::kMeta)); }
  } meta;
  COHORT_EXPECT_THROW_WITH(load_module_state(meta, {}), UsageError, "'weight' is on the meta device");
}

}  // namespace
}  // namespace cohort::checkpoint
