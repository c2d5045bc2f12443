// One thread's image pipeline without files. benchmarks/data/image_pipeline.py writes
// the images, runs this program and the same work in Pillow, round by round, and prints both side by side:
//
//     python benchmarks/data/image_pipeline.py build/benchmarks/data/image_pipeline_benchmark
//
// By itself: `image_pipeline FOLDER CASE` prints the seconds per image of one pass over FOLDER's files, after
// one to warm up. CASE is gray28, colour256 or decode256.
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cohort/bench/timeit.h"
#include "cohort/data/transforms/transform_pipeline.h"

using namespace cohort::data;
namespace bench = cohort::bench;

namespace {

struct File {
  std::string name;
  std::vector<std::byte> bytes;
};

std::vector<File> read_folder(const std::string& folder) {
  std::vector<File> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream stream(entry.path(), std::ios::binary);
    const std::vector<char> text{std::istreambuf_iterator<char>(stream), {}};
    files.push_back({entry.path().string(), std::vector<std::byte>(text.size())});
    std::memcpy(files.back().bytes.data(), text.data(), text.size());
  }
  return files;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: image_pipeline FOLDER gray28|colour256|decode256\n");
    return 2;
  }
  const std::vector<File> files = read_folder(argv[1]);
  const std::string work = argv[2];
  const bool gray = work == "gray28";
  TransformPipeline pipeline =
      gray ? TransformPipeline({random_horizontal_flip(), to_tensor(), normalize({0.286}, {0.353})},
                               ColorMode::kGray)
           : TransformPipeline({random_resized_crop(64), random_horizontal_flip(), to_tensor(),
                                normalize({0.485, 0.456, 0.406}, {0.229, 0.224, 0.225})});
  if (gray) {
    pipeline.set_input_size({28, 28});
  }
  std::vector<float> out(3 * 64 * 64);
  Image image;
  const auto run = [&](const File& file, size_t index) {
    if (work == "decode256") {
      decode_image(file.bytes, ColorMode::kRgb, file.name, image);
      return;
    }
    cohort::base::RandomStream random(1, 0, index, cohort::base::Purpose::kTransform);
    pipeline.run_encoded(file.bytes, file.name, random, out.data(), Layout::kChannelsLast);
  };
  const auto pass = [&] {
    for (size_t i = 0; i < files.size(); ++i) run(files[i], i);
  };
  // The processor's time, as in the PyTorch half.
  const auto once = bench::TimeitOptions().rounds(1).calls(1).clock(bench::cpu_clock());
  std::printf("%.9f\n", bench::timeit(pass, once).best() / static_cast<double>(files.size()));
  return 0;
}
