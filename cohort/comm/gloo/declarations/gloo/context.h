#pragma once

// LibTorch's wheel exports Gloo inside libtorch_cpu.so and ships c10d's header for it, but none of Gloo's
// own. These are the names that c10d/ProcessGroupGloo.hpp mentions, so that it compiles; no object of these
// types is made or laid out here, so there is nothing to keep in step with Gloo but the names.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace gloo {

namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace rendezvous {
// The base of c10d's GlooStore, whose methods are inline and never used here.
struct Store {
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) = 0;
};
}  // namespace rendezvous

}  // namespace gloo
