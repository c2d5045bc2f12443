// How fast the loader reads an image folder. benchmarks/data/loader.py runs this beside PyTorch's DataLoader.
//
//   data_loader_benchmark FOLDER [--workers 0,1,2] [--rounds 3] [--batch 128] [--crop SIZE] [--cache BYTES]
//     [--rgb]
//   data_loader_benchmark --make IMAGES.idx LABELS.idx FOLDER    (first makes the folder of JPEG files)
//
// One line per number of workers: images/s of every round, best first. --crop replaces flips by
// RandomResizedCrop(SIZE) and flips.
#include "cohort/data/loader.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/bench/timeit.h"
#include "cohort/data/dataset_tools.h"
#include "cohort/data/image_folder.h"

namespace {

namespace bench = cohort::bench;

struct Arguments {
  std::string folder;
  std::vector<int> workers = {0, 1, 2};
  int rounds = 3;
  std::int64_t batch = 128;
  double crop = 0;
  std::int64_t cache = 0;
  bool rgb = false;
};

cohort::data::ImageFolderOptions folder_options(const Arguments& arguments) {
  cohort::data::ImageFolderOptions options;
  options.color = arguments.rgb ? cohort::data::ColorMode::kRgb : cohort::data::ColorMode::kGray;
  options.channels_last = true;
  options.cache_bytes = arguments.cache;
  if (arguments.crop > 0) options.transforms.push_back({"RandomResizedCrop", {{"", {arguments.crop}}}});
  options.transforms.push_back({"RandomHorizontalFlip", {}});
  options.transforms.push_back({"ToTensor", {}});
  options.transforms.push_back({"Normalize", {{"mean", {0.5}}, {"std", {0.5}}}});
  if (arguments.rgb) options.transforms.back().args = {{"mean", {0.5, 0.5, 0.5}}, {"std", {0.5, 0.5, 0.5}}};
  return options;
}

void measure(const std::shared_ptr<const cohort::data::ImageFolder>& folder, const Arguments& arguments,
             int workers) {
  cohort::data::Loader loader(
      folder, {.batch_size = arguments.batch, .workers = workers, .shuffle = true, .seed = 1});
  std::int64_t images = 0, epoch = 0;
  bench::Measurement epochs = bench::timeit(
      [&] {
        loader.set_epoch(epoch++);
        images = 0;
        while (auto batch = loader.next()) images += batch->size;
      },
      bench::TimeitOptions().calls(1).rounds(arguments.rounds).warm_up(0));
  std::ranges::sort(epochs.seconds);
  std::printf("workers %d images/s", workers);
  for (const double seconds : epochs.seconds) std::printf(" %.0f", static_cast<double>(images) / seconds);
  std::printf("\n");
  std::fflush(stdout);
}

void make_folder(char** paths) {
  const auto& names = cohort::data::fashion_mnist_class_names();
  const double seconds = bench::seconds_of([&] {
    const auto made =
        cohort::data::folder_from_idx(paths[0], paths[1], paths[2], {{names.begin(), names.end()}, 95, 2});
    std::printf("made %lld files, %lld bytes", static_cast<long long>(made.files),
                static_cast<long long>(made.bytes));
  });
  std::printf(" in %.2f s\n", seconds);
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--rgb") {
      arguments.rgb = true;
    } else if (name.starts_with("--") && i + 1 < argc) {
      const std::string value = argv[++i];
      if (name == "--workers") {
        arguments.workers.clear();
        std::istringstream list(value);
        for (std::string count; std::getline(list, count, ',');)
          arguments.workers.push_back(std::stoi(count));
      } else if (name == "--rounds") {
        arguments.rounds = std::stoi(value);
      } else if (name == "--batch") {
        arguments.batch = std::stoll(value);
      } else if (name == "--crop") {
        arguments.crop = std::stod(value);
      } else if (name == "--cache") {
        arguments.cache = std::stoll(value);
      } else {
        throw cohort::UsageError("benchmark", "unknown option " + std::string(name));
      }
    } else {
      arguments.folder = name;
    }
  }
  if (arguments.folder.empty()) throw cohort::UsageError("benchmark", "no folder was given");
  return arguments;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 5 && std::string_view(argv[1]) == "--make") {
      make_folder(argv + 2);
      return 0;
    }
    const Arguments arguments = parse(argc, argv);
    at::set_num_threads(1);
    std::int64_t files = 0;
    const auto scan = bench::timeit([&] { files = cohort::data::scan_image_folder(arguments.folder).size(); },
                                    bench::TimeitOptions().calls(1).rounds(3).warm_up(0));
    std::printf("scan of %lld files %.1f ms\n", static_cast<long long>(files), scan.best() * 1e3);
    const auto folder =
        std::make_shared<cohort::data::ImageFolder>(arguments.folder, folder_options(arguments));
    for (const int workers : arguments.workers) measure(folder, arguments, workers);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
