#include "cohort/script/file.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <fstream>
#include <limits>
#include <thread>

#include "cohort/base/error.h"
#include "cohort/checkpoint/safetensors.h"
#include "cohort/core/random_scope.h"
#include "cohort/optim/autocast.h"
#include "cohort/script/script.h"
#include "nets.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::script {
namespace {

using test::read_file;
using test::same_bits;
using test::TempDir;
using test::write_file;

class FileTest : public ::testing::Test {
 protected:
  // Saves what fast does with `inputs`, without gradients, and returns what is loaded.
  template <typename Fast, typename... Inputs>
  LoadedProgram through_file(Fast& fast, const Inputs&... inputs) {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i) fast(inputs...);
    fast.save(path);
    return load(path);
  }

  TempDir dir;
  std::filesystem::path path = dir / "a.program";
};

template <typename Model>
void expect_same(Model model, const std::filesystem::path& path, const at::Tensor& x) {
  at::Tensor expected;
  {
    const at::NoGradGuard no_grad;
    model->eval();
    auto fast = script(model);
    for (int i = 0; i < 2; ++i) fast(x);
    fast.save(path);
    expected = model->forward(x);
    for (at::Tensor& parameter : model->parameters()) parameter.zero_();
    for (at::Tensor& buffer : model->buffers()) buffer.zero_();
  }
  const LoadedProgram program = load(path);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(program(x).front(), expected)) << program.explain();
  EXPECT_FALSE(program(x).front().requires_grad());
}

TEST_F(FileTest, RunsWithoutTheModelThatItWasSavedFrom) {
  at::manual_seed(1);
  expect_same(test::small_mlp(), path, at::randn({16, 32}));
  expect_same(test::small_conv_net(), path, at::randn({4, 3, 12, 12}));
  expect_same(test::Residual(), path, at::randn({4, 3, 12, 12}));
  expect_same(test::Tagger(), path, at::randint(50, {4, 7}));
  expect_same(test::Encoder(), path, at::randn({6, 4, 32}));
}

TEST_F(FileTest, KeepsArgumentsOfEveryKind) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const at::Tensor small = torch::tensor({1, 2, 3});
  auto fast = script([=](const at::Tensor& x) {
    const at::Tensor scaled = x * 0.1 + small * 0.5;  // numbers of C++ do not make it double
    const at::Tensor halves = at::cat(scaled.chunk(3, 1), 0).to(at::kDouble).clamp(-kInf, 5e-324);
    return std::vector<at::Tensor>{
        scaled,
        halves.nan_to_num(std::nan(""), 1e308, -1.0 / 3),
        at::where(x > 0, x, -kInf),
        at::upsample_nearest2d(x.view({1, 1, 2, 3}), at::IntArrayRef{4, 6}, std::optional<double>(),
                               std::optional<double>()),
        at::index_put(x, {std::optional<at::Tensor>(), at::arange(2)}, at::ones({})),
        at::einsum("ij,kj->ik", {x, x}),
        at::gelu(x, "tanh"),
        at::full({2}, c10::complex<double>(0.5, -kInf), at::kComplexDouble)};
  });
  const at::Tensor x = torch::tensor({{0.5F, -0.25F, 3.0F}, {1.0F, 7.0F, -2.0F}});
  const LoadedProgram program = through_file(fast, x);
  EXPECT_TRUE(same_bits(program(x), fast(x)));
  EXPECT_EQ(program(x)[0].scalar_type(), at::kFloat);
}

TEST_F(FileTest, HoldsAProgramForEachSizeAndNamesTheInputThatFitsNone) {
  auto fast = script([](const at::Tensor& x, const at::Tensor& y) { return x.matmul(y); });
  const at::Tensor y = at::rand({3, 2});
  {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i) fast(at::rand({4, 3}), y);
    for (int i = 0; i < 2; ++i) fast(at::rand({8, 3}), y);
  }
  fast.save(path, {{"made by", "me"}});
  const LoadedProgram program = load(path);
  for (const std::int64_t batch : {4, 8}) {
    const at::Tensor x = at::rand({batch, 3});
    EXPECT_TRUE(same_bits(program(x, y).front(), x.matmul(y)));
  }
  EXPECT_EQ(program.metadata().at("made by"), "me");
  ASSERT_EQ(program.inputs().size(), 2U);
  COHORT_EXPECT_THROW_WITH(program(at::rand({5, 3}), y), UsageError,
                           "input 0 is Float [5, 3]; recorded were Float [4, 3], or Float [8, 3]");
  COHORT_EXPECT_THROW_WITH(program(at::rand({4, 3}), y.to(at::kDouble)), UsageError,
                           "input 1 is Double [3, 2]; recorded were Float [3, 2]");
  COHORT_EXPECT_THROW_WITH(program(at::rand({3, 4}).t(), y), UsageError, "with strides [1, 4]");
  COHORT_EXPECT_THROW_WITH(program(y), UsageError, "got 1 inputs, expected 2");
  COHORT_EXPECT_THROW_WITH(program(at::rand({4, 3}), at::Tensor()), UsageError, "input 1 is undefined");
  COHORT_EXPECT_THROW_WITH(program(at::rand({4, 3}).requires_grad_(), y), UsageError, "needs a gradient");
  const at::Tensor both = at::rand({4 * 3 + 6});
  COHORT_EXPECT_THROW_WITH(program(both.slice(0, 0, 12).view({4, 3}), both.slice(0, 12).view({3, 2})),
                           UsageError, "shared memory");
}

TEST_F(FileTest, SavesEachStorageOnceAndSharesItBetweenViewsAndPrograms) {
  const at::Tensor weights = at::rand({1000, 100});
  auto fast = script([=](const at::Tensor& x) {
    return x.matmul(weights.slice(0, 0, 100)) + x.matmul(weights.t().slice(1, 900).t());
  });
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::rand({2, 100}), more = at::rand({3, 100});
  for (int i = 0; i < 2; ++i) fast(more);
  const LoadedProgram program = through_file(fast, x);
  EXPECT_TRUE(same_bits(program(x).front(), fast(x)));
  EXPECT_TRUE(same_bits(program(more).front(), fast(more)));
  const std::uintmax_t size = std::filesystem::file_size(path);
  EXPECT_GT(size, weights.nbytes());
  EXPECT_LT(size, weights.nbytes() + 20000);
}

TEST_F(FileTest, WritesToATensorOfItsOwn) {
  const at::Tensor count = at::zeros({1});
  auto fast = script([=](const at::Tensor& x) {
    count.add_(1);
    return x * count;
  });
  const at::Tensor x = at::ones({2});
  const LoadedProgram program = through_file(fast, x);
  EXPECT_EQ(count.item<float>(), 2);
  EXPECT_EQ(program(x).front()[0].item<float>(), 3);
  EXPECT_EQ(program(x).front()[0].item<float>(), 4);
  EXPECT_EQ(load(path)(x).front()[0].item<float>(), 3);
  EXPECT_EQ(count.item<float>(), 2);
}

TEST_F(FileTest, RandomOperatorsDrawFromTheGlobalGeneratorOrAScope) {
  auto fast = script([](const at::Tensor& x) { return at::dropout(x, 0.5, true) + at::rand({4}); });
  const at::Tensor x = at::ones({4});
  const LoadedProgram program = through_file(fast, x);
  at::manual_seed(7);
  const at::Tensor expected = fast(x);
  at::manual_seed(7);
  EXPECT_TRUE(same_bits(program(x).front(), expected));
  const core::RandomKey key{.seed = 3, .step = 1};
  at::Tensor in_scope;
  {
    const core::RandomScope scope(key);
    in_scope = fast(x);
  }
  EXPECT_FALSE(same_bits(in_scope, expected));
  const core::RandomScope scope(key);
  EXPECT_TRUE(same_bits(program(x).front(), in_scope));
}

TEST_F(FileTest, BringsItsOwnAutocastAndIgnoresTheCallers) {
  const at::Tensor weights = at::rand({8, 8});
  auto narrow = script([=](const at::Tensor& x) {
    const optim::Autocast autocast(at::kCPU, at::kBFloat16);
    return x.matmul(weights).relu();
  });
  auto plain = script([=](const at::Tensor& x) { return x.matmul(weights).relu(); });
  const at::Tensor x = at::rand({4, 8});
  const LoadedProgram wide = through_file(plain, x), loaded = through_file(narrow, x);
  EXPECT_EQ(loaded(x).front().scalar_type(), at::kBFloat16);
  EXPECT_TRUE(same_bits(loaded(x).front(), narrow(x)));
  const optim::Autocast autocast(at::kCPU, at::kBFloat16);
  EXPECT_TRUE(same_bits(loaded(x).front(), narrow(x)));
  EXPECT_EQ(wide(x).front().scalar_type(), at::kFloat);
}

TEST_F(FileTest, RunsOnSeveralThreadsAndWithinAScriptedFunction) {
  auto model = test::small_mlp();
  model->eval();
  auto fast = script(model);
  const at::Tensor x = at::randn({16, 32});
  const LoadedProgram program = through_file(fast, x);
  const at::NoGradGuard no_grad;
  const at::Tensor expected = model->forward(x);
  std::vector<std::thread> threads;
  std::vector<int> same(4);
  for (int& count : same) {
    threads.emplace_back([&, program] {
      for (int i = 0; i < 20; ++i) count += same_bits(program(x).front(), expected) ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(same, std::vector<int>(4, 20));
  auto around = script([&](const at::Tensor& input) { return program(input).front().softmax(1); });
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(same_bits(around(x), expected.softmax(1)));
  EXPECT_NE(around.explain().find("program:"), std::string::npos) << around.explain();
}

// Its arena is no tensor that the function around it has captured.
TEST_F(FileTest, RunsElsewhereWhileAScriptedFunctionAroundItIsReplayed) {
  const at::NoGradGuard no_grad;
  auto fast = script([](const at::Tensor& x) {
    at::Tensor y = at::empty_like(x);
    y.copy_(x[0].expand_as(x));
    return (x + 1) * y;
  });
  const auto plain = [](const at::Tensor& x) { return (x + 1) * x[0].expand_as(x); };
  const LoadedProgram program = through_file(fast, at::randn({4, 4}));
  auto around =
      script([&](const at::Tensor& x) { return program(x).front() * 2 + 1; }, ScriptOptions().verify(false));
  std::atomic<bool> over{false};
  std::thread other([&] {
    const at::NoGradGuard here;
    while (!over) program(at::randn({4, 4}));
  });
  int wrong = 0;
  for (int i = 0; i < 2000; ++i) {
    const at::Tensor x = at::randn({4, 4});
    wrong += same_bits(around(x), plain(x) * 2 + 1) ? 0 : 1;
  }
  over = true;
  other.join();
  EXPECT_EQ(wrong, 0) << around.explain();
}

TEST_F(FileTest, SavesModulesAsTheyAreNow) {
  auto model = test::small_mlp();
  auto fast = script(model);
  const at::Tensor x = at::randn({16, 32});
  {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i) fast(x);  // in training mode
  }
  model->eval();
  COHORT_EXPECT_THROW_WITH(fast.save(path), UsageError, "there is no program that needs no gradient");
  for (int i = 0; i < 2; ++i) fast(x).sum().backward();
  COHORT_EXPECT_THROW_WITH(fast.save(path), UsageError, "with gradients");
  EXPECT_FALSE(std::filesystem::exists(path));
  const LoadedProgram program = through_file(fast, x);
  ASSERT_EQ(program.inputs().size(), 1U);
  EXPECT_TRUE(same_bits(program(x).front(), model->forward(x)));
}

TEST_F(FileTest, RejectsAnInputWithATangentWhichItWouldDrop) {
  auto fast = script([](const at::Tensor& x) { return (x * 2).sin(); });
  const LoadedProgram program = through_file(fast, at::rand({4}));
  const at::NoGradGuard no_grad;
  const std::uint64_t level = torch::autograd::forward_ad::enter_dual_level();
  const at::Tensor x = at::_make_dual(at::rand({4}), at::ones({4}), static_cast<std::int64_t>(level));
  COHORT_EXPECT_THROW_WITH(program(x), UsageError, "an input has a tangent");
  torch::autograd::forward_ad::exit_dual_level(level);
}

TEST_F(FileTest, RejectsWhatNoFileCanHold) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::rand({4});
  auto item = script([](const at::Tensor& t) { return t * t.sum().item<double>(); });
  for (int i = 0; i < 2; ++i) item(x);
  COHORT_EXPECT_THROW_WITH(item.save(path), UsageError, "hands a number of a tensor to C++");
  auto own = script([generator = at::make_generator<at::CPUGeneratorImpl>(3)](const at::Tensor& t) {
    return t + at::rand({4}, generator);
  });
  for (int i = 0; i < 2; ++i) own(x);
  COHORT_EXPECT_THROW_WITH(own.save(path), UsageError, "which no file can hold");
  auto strided = script([](const at::Tensor& t) { return t.as_strided({8}, {1}, 0) + 1; });
  const at::Tensor part = at::rand({8}).slice(0, 0, 4);
  for (int i = 0; i < 2; ++i) strided(part);
  COHORT_EXPECT_THROW_WITH(strided.save(path), UsageError, "beyond what the input shows");
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(FileTest, AnyDamageIsFoundBeforeItRuns) {
  const at::Tensor weights = at::rand({4, 4});
  auto fast = script([=](const at::Tensor& x) { return x.matmul(weights) + 1; });
  through_file(fast, at::rand({2, 4}));
  const std::string whole = read_file(path);
  for (std::size_t size = 0; size < whole.size(); size += size < 100 ? 1 : 37) {
    write_file(path, whole.substr(0, size));
    EXPECT_THROW(load(path), DataError) << size;
  }
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string flipped = whole;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 7)));
    write_file(path, flipped);
    EXPECT_THROW(load(path), DataError) << i << ": " << whole.substr(i, 20);
  }
}

// What the text `from` of the program is made into `to`, with a checksum that fits.
void change(const std::filesystem::path& path, const std::string& from, const std::string& to) {
  const auto file = checkpoint::SafetensorsFile::open(path);
  checkpoint::Metadata metadata = file.metadata();
  std::string& text = metadata.at("program");
  ASSERT_NE(text.find(from), std::string::npos) << text;
  text.replace(text.find(from), from.size(), to);
  metadata["xxh3_64"] = checkpoint::checksum_text(checkpoint::checksum(std::as_bytes(std::span(text))));
  checkpoint::save_safetensors(path, file.tensors(), metadata);
}

TEST_F(FileTest, SaysWhatIsNotKnownHere) {
  const at::Tensor weights = at::rand({4, 4});
  auto fast = script([=](const at::Tensor& x) { return x.matmul(weights) + 1; });
  const auto again = [&] { through_file(fast, at::rand({2, 4})); };
  again();
  change(path, "aten::mm", "mine::mm");
  COHORT_EXPECT_THROW_WITH(load(path), DataError, "uses the operator mine::mm, which is not known here");
  again();
  change(path, "\"op\":\"aten::mm\"", "\"op\":\"aten::add\",\"overload\":\"Tensor\"");
  COHORT_EXPECT_THROW_WITH(load(path), DataError, "saved with LibTorch");
  again();
  change(path, "\"outputs\":[", "\"outputs\":[99,");
  COHORT_EXPECT_THROW_WITH(load(path), DataError, "a slot without a value");
  again();
  change(path, "\"outputs\"", "\"results\"");
  COHORT_EXPECT_THROW_WITH(load(path), DataError, "is no program of script mode");
  again();
  change(path, "\"is\":", "\"is\":" + std::string(200'000, '[') + std::string(200'000, ']') + ",\"was\":");
  COHORT_EXPECT_THROW_WITH(load(path), DataError, "its JSON is broken or too deep");
  again();
  const auto file = checkpoint::SafetensorsFile::open(path);
  checkpoint::Metadata metadata = file.metadata();
  metadata["format_version"] = "2";
  checkpoint::save_safetensors(path, file.tensors(), metadata);
  COHORT_EXPECT_THROW_WITH(load(path), DataError, "has format version 2, this Cohort reads version 1");
  checkpoint::save_safetensors(path, file.tensors(), {});
  COHORT_EXPECT_THROW_WITH(load(path), DataError, "is no program of script mode");
  COHORT_EXPECT_THROW_WITH(load(dir / "nothing"), DataError, "nothing");
}

}  // namespace
}  // namespace cohort::script
