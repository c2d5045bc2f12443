#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/data/codecs/codec.h"
#include "cohort/data/idx_dataset.h"
#include "cohort/data/image_folder.h"
#include "cohort/data/loader.h"
#include "cohort/data/synthetic.h"
#include "cohort/data/tensor_dataset.h"
#include "tests/support/temp_dir.h"
#include "tests/support/throws.h"

namespace cohort::data {
namespace {

// A user's data set, as docs/guide/data.md shows it.
class Squares : public ExampleDataset {
 public:
  std::int64_t size() const override { return 1000; }
  std::vector<at::Tensor> get(std::int64_t i, base::RandomStream&) const override {
    return {at::full({1}, static_cast<float>(i)), at::full({1}, static_cast<float>(i * i))};
  }
};

COHORT_REGISTER_DATASET(squares, [](const DatasetArgs&) { return std::make_shared<Squares>(); });

Batch first_batch(std::shared_ptr<const Dataset> dataset, const LoaderOptions& options) {
  Loader loader(std::move(dataset), options);
  return loader.next().value();
}

Image make_image(std::int64_t height, std::int64_t width, std::uint8_t start) {
  Image image;
  image.reshape(height, width, 3);
  for (auto& value : image.pixels) value = start += 7;
  return image;
}

void write_png(const std::filesystem::path& path, const Image& image) {
  const std::vector<std::byte> file = encode_png(image);
  test::write_file(path, {reinterpret_cast<const char*>(file.data()), file.size()});
}

TEST(ExampleDatasetTest, IsFifteenLines) {
  const auto dataset = make_dataset("squares", {});
  const Batch batch = first_batch(dataset, {.batch_size = 4, .workers = 1});
  EXPECT_TRUE(at::equal(batch.fields[1], at::tensor({0.F, 1.F, 4.F, 9.F}).reshape({4, 1})));
  EXPECT_EQ(dataset->fields()[0].name, "input");
}

// Takes any index: what keeps others away is the base.
class Single : public ExampleDataset {
 public:
  std::int64_t size() const override { return 1; }
  std::vector<at::Tensor> get(std::int64_t, base::RandomStream&) const override {
    return {at::zeros({2}), at::zeros({})};
  }
};

class Ragged : public ExampleDataset {
 public:
  std::int64_t size() const override { return 4; }
  std::vector<at::Tensor> get(std::int64_t i, base::RandomStream&) const override {
    if (i == 3) return {};
    return {at::zeros({i + 1}, i == 2 ? at::kDouble : at::kFloat)};
  }
};

TEST(ExampleDatasetTest, SamplesOfAnotherShapeAreNamed) {
  Loader loader(std::make_shared<Ragged>(), {.batch_size = 2});
  COHORT_EXPECT_THROW_WITH(
      loader.next(), DataError,
      "sample 1: [data.dataset] get(1) returned Float [2] as field 'input', sample 0 Float [1]");
  loader.restore({0, 3});
  COHORT_EXPECT_THROW_WITH(loader.next(), DataError, "get(3) returned 0 tensors, sample 0 has 1");
}

// Some samples cannot be read; the others have two fields.
class Damaged : public ExampleDataset {
 public:
  explicit Damaged(std::int64_t bad, std::int64_t size = 8) : bad_(bad), size_(size) {}
  std::int64_t size() const override { return size_; }
  std::vector<at::Tensor> get(std::int64_t i, base::RandomStream&) const override {
    if (i < bad_) throw std::runtime_error(base::concat("sample ", i, " is damaged"));
    return {at::full({2}, static_cast<float>(i)), at::scalar_tensor(i, at::kLong)};
  }

 private:
  std::int64_t bad_, size_;
};

TEST(ExampleDatasetTest, ADamagedFirstSampleIsRejectedOrSkippedLikeAnyOther) {
  for (const int workers : {0, 2}) {
    Loader reject(std::make_shared<Damaged>(3), {.batch_size = 8, .workers = workers});
    COHORT_EXPECT_THROW_WITH(reject.next(), DataError, "sample 0 is damaged");
    Loader skip(std::make_shared<Damaged>(3),
                {.batch_size = 8, .workers = workers, .on_error = OnError::kSkip});
    EXPECT_TRUE(at::equal(skip.next()->target(), at::arange(3, 8)));
    EXPECT_EQ(skip.counters().samples_skipped, 3);
  }
  COHORT_EXPECT_THROW_WITH(Damaged(8).fields(), std::runtime_error, "sample 0 is damaged");
  COHORT_EXPECT_THROW_WITH(Damaged(100, 101).fields(), std::runtime_error, "sample 0 is damaged");
  COHORT_EXPECT_THROW_WITH(Damaged(0, 0).fields(), UsageError, "has no samples");
  EXPECT_EQ(Damaged(99, 101).fields().size(), 2U);
}

// Returns what it is given, as both fields of each sample.
class Given : public ExampleDataset {
 public:
  explicit Given(std::vector<at::Tensor> samples) : samples_(std::move(samples)) {}
  std::int64_t size() const override { return std::ssize(samples_); }
  std::vector<at::Tensor> get(std::int64_t i, base::RandomStream&) const override {
    return {at::zeros({1}), samples_[static_cast<std::size_t>(i)]};
  }

 private:
  std::vector<at::Tensor> samples_;
};

TEST(ExampleDatasetTest, TensorsThatAreNotDenseMemoryOfTheCpuAreRejected) {
  const at::Tensor here = at::ones({2}), elsewhere = at::ones({2}, at::kMeta);
  COHORT_EXPECT_THROW_WITH(
      Loader(std::make_shared<Given>(std::vector{elsewhere}), {}), UsageError,
      "get(0) returned field 'target' on meta, expected the CPU. Try: return tensors of the CPU");
  Loader later(std::make_shared<Given>(std::vector{here, elsewhere, here.to_sparse(), at::Tensor()}), {});
  EXPECT_TRUE(later.next().has_value());
  COHORT_EXPECT_THROW_WITH(later.next(), DataError,
                           "sample 1: [data.dataset] get(1) returned field 'target' on meta");
  later.restore({0, 2});
  COHORT_EXPECT_THROW_WITH(later.next(), DataError, "of layout Sparse, expected a dense tensor");
  later.restore({0, 3});
  COHORT_EXPECT_THROW_WITH(later.next(), DataError, "get(3) returned field 'target' without a value");
}

TEST(ExampleDatasetTest, ConjugatesAndNegativesAreWritten) {
  const at::Tensor z = at::complex(at::ones({2}), at::ones({2}));
  const at::Tensor conjugate = z.conj(), negative = at::imag(conjugate);
  ASSERT_TRUE(conjugate.is_conj() && negative.is_neg());
  for (const at::Tensor& view : {conjugate, negative}) {
    EXPECT_TRUE(at::equal(first_batch(std::make_shared<Given>(std::vector{view}), {}).target()[0],
                          view.clone().resolve_conj().resolve_neg()));
    EXPECT_TRUE(
        at::equal(first_batch(std::make_shared<TensorDataset>(std::vector<at::Tensor>{view.unsqueeze(0)}), {})
                      .input()[0],
                  view.clone().resolve_conj().resolve_neg()));
  }
}

TEST(RegistryTest, UnknownAndTakenNamesAreRejected) {
  COHORT_EXPECT_THROW_WITH(make_dataset("sqares", {}), UsageError,
                           "there is no data set 'sqares'. Try: squares; the data sets are idx, ");
  const DatasetFactory none = [](const DatasetArgs&) { return nullptr; };
  COHORT_EXPECT_THROW_WITH(register_dataset("squares", none), UsageError, "'squares' is registered already");
  COHORT_EXPECT_THROW_WITH(register_dataset("idx", none), UsageError,
                           "'idx' is registered already, by Cohort");
  COHORT_EXPECT_THROW_WITH(register_dataset("nothing", {}), UsageError, "needs a factory");
  const std::vector<std::string> names = dataset_names();
  for (const char* name : {"idx", "image_folder", "squares", "synthetic"}) {
    EXPECT_EQ(std::ranges::count(names, name), 1) << name;
  }
  COHORT_EXPECT_THROW_WITH(make_dataset("imagefolder", {}), UsageError,
                           "Try: image_folder; the data sets are idx, ");
  COHORT_EXPECT_THROW_WITH(make_dataset("synthetic", {}), UsageError,
                           "data set 'synthetic' is made from options, not from text. Try: "
                           "data::SyntheticDataset, or data.type: synthetic in a configuration");
  // As when a second library with the same name is loaded.
  EXPECT_FALSE(register_dataset_at_load("squares", none, "other.cpp", 7));
  COHORT_EXPECT_THROW_WITH(make_dataset("squares", {}), UsageError, "registered twice: by ");
  COHORT_EXPECT_THROW_WITH(make_dataset("squares", {}), UsageError, "other.cpp:7");
}

TEST(RegistryTest, ALibraryThatTakesANameOfCohortsOwnIsNamed) {
  const DatasetFactory none = [](const DatasetArgs&) { return nullptr; };
  EXPECT_FALSE(register_dataset_at_load("image_folder", none, "other.cpp", 8));
  const char* message = "'image_folder' was registered twice: by Cohort and by other.cpp:8";
  COHORT_EXPECT_THROW_WITH(check_dataset_name("image_folder"), UsageError, message);
  COHORT_EXPECT_THROW_WITH(make_dataset("image_folder", {}), UsageError, message);
}

TEST(DatasetTest, AnIndexThatIsNotInTheDatasetIsRejected) {
  const test::TempDir dir;
  write_png(dir / "a/1.png", make_image(2, 2, 1));
  test::write_file(dir / "i", std::string("\0\0\x08\x03\0\0\0\x01\0\0\0\x02\0\0\0\x02", 16) + "abcd");
  test::write_file(dir / "l", std::string("\0\0\x08\x01\0\0\0\x01\0", 9));
  const auto folder =
      std::make_shared<ImageFolder>(dir.path().string(), ImageFolderOptions{.cache_bytes = 99});
  const std::vector<std::shared_ptr<const Dataset>> datasets = {
      std::make_shared<TensorDataset>(std::vector<at::Tensor>{at::zeros({1, 2}), at::zeros({1})}),
      std::make_shared<SyntheticDataset>(SyntheticOptions{.size = 1}), std::make_shared<Single>(), folder,
      std::make_shared<IdxDataset>((dir / "i").string(), (dir / "l").string())};
  std::vector<std::byte> memory(1 << 20);
  const std::vector<std::byte*> out = {memory.data(), memory.data() + memory.size() / 2};
  base::RandomStream random(1, 0, 0, base::Purpose::kTransform);
  for (const auto& dataset : datasets) {
    dataset->fields();
    EXPECT_NO_THROW(dataset->read(0, random, out));
    for (const std::int64_t index : {std::int64_t{1}, std::int64_t{1} << 40, std::int64_t{-1}}) {
      COHORT_EXPECT_THROW_WITH(dataset->read(index, random, out), UsageError,
                               base::concat("got index ", index, ", expected 0 to 0: there are 1 samples"));
    }
  }
  COHORT_EXPECT_THROW_WITH(folder->label(1), UsageError, "[data.image_folder] got index 1");
  COHORT_EXPECT_THROW_WITH(folder->describe(-1), UsageError, "got index -1");
}

TEST(TensorDatasetTest, RowsAreSamples) {
  const at::Tensor x = at::randn({6, 2, 3}),
                   y = at::arange(12, at::kInt).reshape({6, 2}).t().contiguous().t();
  const Batch batch =
      first_batch(std::make_shared<TensorDataset>(std::vector<at::Tensor>{x, y}), {.batch_size = 6});
  EXPECT_TRUE(at::equal(batch.fields[0], x));
  EXPECT_TRUE(at::equal(batch.fields[1], y));
  COHORT_EXPECT_THROW_WITH(TensorDataset({}), UsageError, "no tensor");
  COHORT_EXPECT_THROW_WITH(TensorDataset({at::zeros({})}), UsageError, "'input' is a scalar");
  COHORT_EXPECT_THROW_WITH(TensorDataset({x, at::zeros({5})}), UsageError,
                           "'target' has 5 rows, the first tensor has 6");
}

TEST(RegistryTest, OptionsThatAFactoryDoesNotReadAreRejected) {
  register_dataset("picky", [](const DatasetArgs& args) {
    if (args.integer("samples", 5) == 3) throw std::runtime_error("stoll");
    if (args.has("root")) throw DataError("mine.open", "cannot open " + args.at("root"));
    if (args.flag("void", false)) return std::shared_ptr<const Dataset>();
    return std::shared_ptr<const Dataset>(std::make_shared<Damaged>(0, args.integer("samples", 5)));
  });
  EXPECT_EQ(make_dataset("picky", {{"samples", "7"}, {"split", "train"}, {"path", "x"}})->size(), 7);
  COHORT_EXPECT_THROW_WITH(make_dataset("picky", {{"smaples", "7"}}), ConfigError,
                           "[data.options] data set 'picky' has no option smaples. Try: samples; its options "
                           "are root, samples, void");
  COHORT_EXPECT_THROW_WITH(make_dataset("picky", {{"samples", "x"}}), ConfigError,
                           "data set 'picky': option samples is 'x', expected a whole number");
  COHORT_EXPECT_THROW_WITH(make_dataset("picky", {{"samples", "3"}, {"split", "train"}}), DataError,
                           "[data.registry] while making data set 'picky' (split train): stoll");
  COHORT_EXPECT_THROW_WITH(make_dataset("picky", {{"root", "here"}}), DataError,
                           "while making data set 'picky': [mine.open] cannot open here");
  COHORT_EXPECT_THROW_WITH(make_dataset("picky", {{"void", "yes"}}), UsageError,
                           "of data set 'picky' returned nothing");
}

TEST(RegistryTest, AnOptionThatOneSplitDoesNotReadIsRejectedNamingTheSplit) {
  register_dataset("flipping", [](const DatasetArgs& args) {
    const bool flips = args.at("split") == "train" && args.flag("flip", false);
    return std::make_shared<Damaged>(0, flips ? 6 : 5);
  });
  EXPECT_EQ(make_dataset("flipping", {{"flip", "yes"}, {"split", "train"}})->size(), 6);
  COHORT_EXPECT_THROW_WITH(make_dataset("flipping", {{"flip", "yes"}, {"split", "val"}}), ConfigError,
                           "data set 'flipping' (split val) has no option flip");
}

TEST(SyntheticDatasetTest, IsAFunctionOfSeedAndIndex) {
  SyntheticOptions options{.size = 200, .shape = {3, 8, 12}, .num_classes = 5, .seed = 4};
  const Batch a = first_batch(std::make_shared<SyntheticDataset>(options), {.batch_size = 200});
  options.channels_last = true;
  const Batch b =
      first_batch(std::make_shared<SyntheticDataset>(options), {.batch_size = 200, .workers = 2, .seed = 99});
  EXPECT_TRUE(b.fields[0].is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_FALSE(b.fields[0].is_contiguous());
  EXPECT_EQ(a.fields[1].max().item<std::int64_t>(), 4);
  // Channels-last takes the same numbers in the same order (channel by channel).
  EXPECT_TRUE(at::equal(a.fields[0], b.fields[0]));
  EXPECT_NEAR(a.fields[0].mean().item<double>(), 0.0, 0.15);
  EXPECT_NEAR(a.fields[0].std().item<double>(), 1.0, 0.1);
  options.seed = 5;
  EXPECT_FALSE(at::equal(
      first_batch(std::make_shared<SyntheticDataset>(options), {.batch_size = 200}).fields[1], a.fields[1]));
  COHORT_EXPECT_THROW_WITH(SyntheticDataset({.shape = {3, 0, 4}}), UsageError, "shape must be [C, H, W]");
  COHORT_EXPECT_THROW_WITH(SyntheticDataset({.num_classes = 0}), UsageError, "num_classes is 0");
}

TEST(ImageFolderTest, ReadsImagesAndLabels) {
  const test::TempDir dir;
  const Image cat = make_image(4, 5, 3), dog = make_image(4, 5, 90);
  write_png(dir / "cat/1.png", cat);
  write_png(dir / "dog/1.png", dog);
  for (const bool channels_last : {false, true}) {
    for (const std::int64_t cache : {0, 1 << 20}) {
      const auto folder = std::make_shared<ImageFolder>(
          dir.path().string(), ImageFolderOptions{.channels_last = channels_last, .cache_bytes = cache});
      EXPECT_EQ(folder->classes(), (std::vector<std::string>{"cat", "dog"}));
      Loader loader(folder, {.batch_size = 2});
      for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
        loader.set_epoch(epoch);
        Batch batch = loader.next().value();
        EXPECT_EQ(batch.input().sizes(), (at::IntArrayRef{2, 3, 4, 5}));
        EXPECT_EQ(batch.input().is_contiguous(at::MemoryFormat::ChannelsLast), channels_last);
        EXPECT_TRUE(at::equal(batch.target(), at::tensor({0, 1}, at::kLong)));
        for (std::int64_t c = 0; c < 3; ++c) {
          EXPECT_EQ(batch.input()[1][c][2][4].item<float>(),
                    static_cast<float>(dog.pixels[static_cast<std::size_t>((2 * 5 + 4) * 3 + c)]) / 255.0F);
        }
      }
    }
  }
}

TEST(ImageFolderTest, BrokenFilesAreNamedOrSkipped) {
  const test::TempDir dir;
  for (int i = 0; i < 6; ++i) write_png(dir / ("a/" + std::to_string(i) + ".png"), make_image(4, 4, 1));
  test::write_file(dir / "a/3.png", "no image");
  const auto folder = std::make_shared<ImageFolder>(dir.path().string());
  Loader reject(folder, {.batch_size = 4, .workers = 2});
  COHORT_EXPECT_THROW_WITH(reject.next(), DataError,
                           "[data.image] " + dir.path().string() + "/a/3.png: not an image");
  Loader skip(folder, {.batch_size = 4, .workers = 2, .on_error = OnError::kSkip});
  EXPECT_EQ(skip.next()->size, 3);
  EXPECT_EQ(skip.next()->size, 2);
  EXPECT_EQ(skip.counters().samples_skipped, 1);
  std::filesystem::remove(dir / "a/1.png");
  COHORT_EXPECT_THROW_WITH(reject.next(), DataError, "a/1.png: No such file or directory");
}

TEST(ImageFolderTest, ABrokenFirstImageIsRejectedOrSkippedLikeAnyOther) {
  const test::TempDir dir;
  test::write_file(dir / "a/0.png", "no image");
  test::write_file(dir / "a/1.png", "");
  for (int i = 2; i < 5; ++i) write_png(dir / ("a/" + std::to_string(i) + ".png"), make_image(4, 6, 1));
  const auto folder = std::make_shared<ImageFolder>(dir.path().string());  // no transform fixes the size
  EXPECT_EQ(folder->fields()[0].shape, (std::vector<std::int64_t>{3, 4, 6}));
  Loader reject(folder, {.batch_size = 5});
  COHORT_EXPECT_THROW_WITH(reject.next(), DataError, "a/0.png: not an image");
  Loader skip(folder, {.batch_size = 5, .on_error = OnError::kSkip});
  EXPECT_EQ(skip.next()->size, 3);
  for (int i = 2; i < 5; ++i) test::write_file(dir / ("a/" + std::to_string(i) + ".png"), "no image");
  COHORT_EXPECT_THROW_WITH(ImageFolder(dir.path().string()), DataError, "a/0.png: not an image");
}

TEST(ImageFolderTest, TransformsDrawTheSameWhateverTheWorkers) {
  const test::TempDir dir;
  for (int i = 0; i < 30; ++i)
    write_png(dir / ("a/" + std::to_string(i) + ".png"), make_image(20, 24, static_cast<std::uint8_t>(i)));
  const auto folder = std::make_shared<ImageFolder>(
      dir.path().string(), ImageFolderOptions{.transforms = {{"RandomResizedCrop", {{"", {8}}}},
                                                             {"RandomHorizontalFlip", {}},
                                                             {"ToTensor", {}}}});
  LoaderOptions options{.batch_size = 30, .shuffle = true, .seed = 8};
  const at::Tensor expected = first_batch(folder, options).fields[0].clone();
  EXPECT_EQ(expected.sizes(), (at::IntArrayRef{30, 3, 8, 8}));
  for (const int workers : {1, 8}) {
    options.workers = workers;
    EXPECT_TRUE(at::equal(first_batch(folder, options).fields[0], expected));
  }
  options.seed = 9;
  EXPECT_FALSE(at::equal(first_batch(folder, options).fields[0], expected));
}

TEST(IdxDatasetTest, ReadsImagesAndLabels) {
  const test::TempDir dir;
  std::string images{'\0', '\0', 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2},
      labels{'\0', '\0', 8, 1, 0, 0, 0, 2};
  images += std::string("\x01\x02\x03\x04\x05\x06\x07\xff", 8);
  labels += std::string("\x09\x03", 2);
  test::write_file(dir / "i", images);
  test::write_file(dir / "l", labels);
  const auto dataset = std::make_shared<IdxDataset>((dir / "i").string(), (dir / "l").string());
  const Batch batch = first_batch(dataset, {.batch_size = 2, .workers = 1});
  EXPECT_EQ(batch.fields[0].sizes(), (at::IntArrayRef{2, 1, 2, 2}));
  EXPECT_EQ(batch.fields[0][1][0][1][1].item<float>(), 1.0F);
  EXPECT_TRUE(at::equal(batch.fields[1], at::tensor({9, 3}, at::kLong)));
  EXPECT_EQ(dataset->classes().size(), 10U);
  EXPECT_EQ(dataset->describe(1), (dir / "i").string() + " [1]");
  test::write_file(dir / "l", std::string{'\0', '\0', 8, 1, 0, 0, 0, 1, 5});
  COHORT_EXPECT_THROW_WITH(IdxDataset((dir / "i").string(), (dir / "l").string()), DataError, "has 2 images");
}

TEST(FingerprintTest, FollowsTheSamplesAndNotWhereTheyLie) {
  test::TempDir a, b;
  for (const test::TempDir* folder : {&a, &b}) {
    for (const char* file : {"ape/0.png", "bee/0.png", "bee/1.png"})
      write_png(*folder / file, make_image(4, 4, 3));
  }
  const auto of = [](const test::TempDir& folder) {
    return ImageFolder(folder.path().string()).fingerprint();
  };
  const std::string first = of(a);
  EXPECT_EQ(first.size(), 16U);
  EXPECT_EQ(of(b), first);
  std::filesystem::rename(b / "bee/1.png", b / "bee/2.png");
  EXPECT_NE(of(b), first);
  std::filesystem::rename(b / "bee/2.png", b / "ape/1.png");
  EXPECT_NE(of(b), first);
  write_png(a / "bee/1.png", make_image(40, 50, 3));  // of another size in bytes
  EXPECT_NE(of(a), first);
  EXPECT_EQ(SyntheticDataset({.seed = 3}).fingerprint(), SyntheticDataset({.seed = 3}).fingerprint());
  EXPECT_NE(SyntheticDataset({.seed = 3}).fingerprint(), SyntheticDataset({.seed = 4}).fingerprint());
}

}  // namespace
}  // namespace cohort::data
