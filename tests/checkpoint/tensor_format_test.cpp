#include "cohort/checkpoint/tensor_format.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cohort/checkpoint/run_checkpoints.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::checkpoint {
namespace {

// Safetensors whose values are negated.
TensorMap negated(TensorMap tensors) {
  for (auto& [name, tensor] : tensors) tensor = -tensor;
  return tensors;
}

COHORT_REGISTER_TENSOR_FORMAT("negated",
                              {.extension = "neg",
                               .write =
                                   [](const std::filesystem::path& path, const TensorMap& tensors) {
                                     return write_new_safetensors(path, negated(tensors));
                                   },
                               .read =
                                   [](const std::shared_ptr<const MappedFile>& file) {
                                     return negated(SafetensorsFile::from_mapping(file).tensors());
                                   }});

TEST(TensorFormatTest, ACheckpointIsWrittenInTheFormatThatIsAskedForAndReadInItsOwn) {
  const test::TempDir dir;
  const TensorMap model = {{"weight", at::arange(3, at::kFloat)}};
  const auto save = [&](const char* format, const char* name) {
    return RunCheckpoints(dir.path(), {.format = format}).save(name, {.model = model});
  };
  const auto folder = save("negated", "first");
  EXPECT_TRUE(at::equal(load_safetensors(folder / "model.neg")[0].second, -model[0].second));
  EXPECT_TRUE(at::equal(RunCheckpoints::load(folder).model[0].second, model[0].second));
  const auto usual = save("safetensors", "second");
  EXPECT_TRUE(std::filesystem::exists(usual / "model.safetensors"));
  EXPECT_EQ(RunCheckpoints(dir.path()).load_usable()->folder, usual);
  EXPECT_TRUE(at::equal(RunCheckpoints::load(folder).model[0].second, model[0].second));
}

TEST(TensorFormatTest, UnknownFormatsAreErrorsThatSayWhatToLoad) {
  COHORT_EXPECT_THROW_WITH(tensor_format("safetensor"), UsageError,
                           "there is no tensor format 'safetensor'. Try: safetensors; ");
  COHORT_EXPECT_THROW_WITH(tensor_format_of("pt"), DataError, "no tensor format has the extension pt");
  COHORT_EXPECT_THROW_WITH(
      register_tensor_format("again", {.extension = "neg",
                                       .write = [](const auto&, const auto&) { return FileSummary{}; },
                                       .read = [](const auto&) { return TensorMap{}; }}),
      UsageError, "the tensor format 'negated' has the extension neg already");
}

}  // namespace
}  // namespace cohort::checkpoint
