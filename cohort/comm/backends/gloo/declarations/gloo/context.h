#pragma once

// LibTorch's wheel exports Gloo inside libtorch_cpu.so and ships c10d's header for it, but none of Gloo's
// own. These are the names that c10d/ProcessGroupGloo.hpp mentions, so that it compiles, and what closes
// connections; no object of these types is made or laid out here, so there is nothing to keep in step with
// Gloo but the names.

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace gloo {

namespace transport {
class Device;
class UnboundBuffer;

// Destructors that are not defined here keep the types' own descriptions, by which dynamic_cast goes, in
// LibTorch.
class Pair {
 public:
  virtual ~Pair();
};

namespace tcp {
class Pair : public transport::Pair {
 public:
  ~Pair() override;
  std::exception_ptr signalExceptionExternal(const std::string& message);
};
}  // namespace tcp
}  // namespace transport

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  std::unique_ptr<transport::Pair>& getPair(int rank);
  void closeConnections();
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
