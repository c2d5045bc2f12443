#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "cohort/base/threads/future.h"

/// Functions that run later, and their results: what queues of functions are made of.
namespace cohort::base::future_detail {

// A function that is yet to run, and its result.
class Task : public State {
 public:
  using State::State;
  /// Runs the function, and ends with what it threw, if anything.
  void run() noexcept;
  /// Destroys the function, and is done: with this error, if one is given.
  void end(std::exception_ptr error) noexcept;

 protected:
  virtual void execute() = 0;
  virtual void drop() noexcept = 0;
  /// Of its span in the timeline; null: it has none.
  virtual const char* timeline_name() const { return what(); }
  virtual bool on_begin() noexcept { return true; }  // under the mutex; false: it does not run
  bool is_running() const { return is_running_; }    // under the mutex

 private:
  bool is_running_ = false;  // or has ended
};

template <typename T, typename Fn, typename Base>
class FunctionTask final : public ValueState<T, Base> {
 public:
  FunctionTask(const char* what, Fn fn) : ValueState<T, Base>(what), fn_(std::in_place, std::move(fn)) {}

 protected:
  void execute() override { this->set_from(*fn_); }
  void drop() noexcept override { fn_.reset(); }

 private:
  std::optional<Fn> fn_;
};

/// Makes a task of `fn`, hands it to `post`, and returns its future. `Base`: the kind of task that runs
/// there.
template <typename Base, typename Fn, typename Post>
auto submit(const char* what, Fn fn, const Post& post) {
  using T = std::invoke_result_t<Fn&>;
  auto task = std::make_shared<FunctionTask<T, Fn, Base>>(what, std::move(fn));
  post(task);
  return Future<T>(std::shared_ptr<ValueState<T, Base>>(std::move(task)));
}

}  // namespace cohort::base::future_detail
