// The C++ twins that docs/guide/from_pytorch.md shows beside PyTorch's tutorial programs, small enough for a
// minute.
//
//   Run:      from_pytorch one_process | ranks | training [PHOTOS]     PHOTOS: a folder per class
//   Expect:   a line per twin with its loss, or what it checked; the status is 0
//
#include <cstdio>
#include <exception>
#include <string>

void run_one_process();
void run_ranks();
void run_training(const std::string& folder);

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "";
  try {
    if (which == "one_process") {
      run_one_process();
    } else if (which == "ranks") {
      run_ranks();
    } else if (which == "training") {
      run_training(argc > 2 ? argv[2] : "");
    } else {
      std::fprintf(stderr, "usage: from_pytorch one_process | ranks | training\n");
      return 2;
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
