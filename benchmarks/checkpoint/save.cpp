// Saves a state of MIB mebibytes as a checkpoint's model file (written, checksummed, synced, renamed), beside
// a plain write + fsync of the same bytes and, when COHORT_PYTHON is set, beside PyTorch's torch.save + fsync
// and safetensors' save_file + fsync, in turn.
//
//     OMP_NUM_THREADS=1 COHORT_PYTHON=python benchmark_checkpoint_save FOLDER [MIB=500] [ROUNDS=5]
#include <ATen/ops/rand.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>

#include "cohort/bench/compare.h"
#include "cohort/checkpoint/safetensors.h"

namespace {

using cohort::checkpoint::TensorMap;
namespace bench = cohort::bench;
namespace fs = std::filesystem;

/// What any program needs at least: one write after the other, then fsync.
void write_plain(const fs::path& path, const TensorMap& tensors) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  for (const auto& [name, tensor] : tensors) {
    const char* data = static_cast<const char*>(tensor.const_data_ptr());
    for (size_t done = 0; done < tensor.nbytes();) {
      const ssize_t written = ::write(file, data + done, tensor.nbytes() - done);
      if (written <= 0) {
        std::perror("write");
        std::exit(1);
      }
      done += static_cast<size_t>(written);
    }
  }
  ::fsync(file);
  ::close(file);
}

constexpr const char* kPython = R"(
import os, sys, time, torch
from safetensors.torch import save_file
way, path, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
state = {f"layer{i}.weight": torch.rand(mib * 4096) for i in range(64)}
start = time.perf_counter()
if way == "torch":
    with open(path, "wb") as f:
        torch.save(state, f); f.flush(); os.fsync(f.fileno())
else:
    save_file(state, path)
    with open(path, "rb") as f: os.fsync(f.fileno())
print(time.perf_counter() - start)
)";

double python_seconds(const fs::path& script, const char* way, const fs::path& path, int mib) {
  const fs::path out = path.string() + ".time";
  const std::string command = std::string("\"") + std::getenv("COHORT_PYTHON") + "\" \"" + script.string() +
                              "\" " + way + " \"" + path.string() + "\" " + std::to_string(mib) + " > \"" +
                              out.string() + "\"";
  if (std::system(command.c_str()) != 0) {
    std::exit(1);
  }
  double result = 0;
  std::ifstream(out) >> result;
  fs::remove(out);
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s FOLDER [MIB] [ROUNDS]\n", argv[0]);
    return 2;
  }
  const fs::path folder = argv[1];
  const int mib = argc > 2 ? std::atoi(argv[2]) : 500;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 5;
  TensorMap tensors;
  for (int i = 0; i < 64; ++i) {
    tensors.emplace_back("layer" + std::to_string(i) + ".weight", at::rand({mib * 4096L}));
  }
  const fs::path script = folder / "bench.py";
  std::ofstream(script) << kPython;
  const fs::path path = folder / "bench.bin";
  std::vector<bench::Variant> ways;
  const auto add = [&](const char* name, const std::function<double()>& seconds) {
    ways.push_back(bench::Variant::sampled(name, [&path, seconds] {
      fs::remove(path);
      ::sync();
      return seconds();
    }));
  };
  add("cohort save_safetensors",
      [&] { return bench::seconds_of([&] { cohort::checkpoint::save_safetensors(path, tensors); }); });
  add("plain write + fsync", [&] { return bench::seconds_of([&] { write_plain(path, tensors); }); });
  if (std::getenv("COHORT_PYTHON") != nullptr) {
    add("PyTorch torch.save + fsync", [&] { return python_seconds(script, "torch", path, mib); });
    add("Python safetensors + fsync", [&] { return python_seconds(script, "safetensors", path, mib); });
  }
  const auto figures =
      bench::compare(ways, bench::CompareOptions().timeit(bench::TimeitOptions().rounds(rounds).warm_up(0)));
  fs::remove(path);
  fs::remove(script);
  std::printf("%d MiB, %d rounds, in %s\n%s", mib, rounds, folder.c_str(), figures.text().c_str());
  return 0;
}
