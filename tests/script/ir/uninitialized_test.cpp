#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cohort/core/parallel.h"
#include "cohort/script/script.h"
#include "tests/script/like_eager.h"
#include "tests/support/contains.h"

// Tensors that C++ fills without an operator, and what operators do with a part of them.
namespace cohort::script {
namespace {

using test::Body;
using test::contains;
using test::expect_like_eager;

const std::vector<float> kNumbers = {1.5F, 2, 3, -4, 5, 6.25F};

struct Filler {
  const char* name;
  std::function<at::Tensor()> make;  // [2, 3]
};
struct Use {
  const char* name;
  std::function<Tensors(const at::Tensor& x, at::Tensor t)> run;  // x: [3]
};

void fill_row(at::Tensor t, std::int64_t row) {
  auto numbers = t.accessor<float, 2>();
  for (std::int64_t i = 0; i < 3; ++i) numbers[row][i] = kNumbers[static_cast<std::size_t>(row * 3 + i)];
}

const std::vector<Filler> kFillers = {
    {"a tensor of a vector", [] { return torch::tensor(kNumbers).view({2, 3}); }},
    {"a tensor of a list", [] { return torch::tensor({{1.0F, 2.0F, 3.0F}, {4.0F, 5.0F, 6.0F}}); }},
    {"an accessor into empty",
     [] {
       at::Tensor t = at::empty({2, 3});
       fill_row(t, 0);
       fill_row(t, 1);
       return t;
     }},
    {"a pointer into empty_like",
     [] {
       at::Tensor t = at::empty_like(at::zeros({2, 3}));
       std::copy(kNumbers.begin(), kNumbers.end(), t.data_ptr<float>());
       return t;
     }},
    {"a blob of C++",
     [] {
       auto* const numbers = new std::vector<float>(kNumbers);
       return at::from_blob(numbers->data(), {2, 3}, [numbers](void*) { delete numbers; });
     }},
    {"an accessor and an operator for a row each",
     [] {
       at::Tensor t = at::empty({2, 3});
       fill_row(t, 0);
       t[1].fill_(0.5);
       return t;
     }},
};

const std::vector<Use> kInPlace = {
    {"add_", [](const at::Tensor& x, at::Tensor t) { return Tensors{t.add_(x) * 2}; }},
    {"mul_", [](const at::Tensor& x, at::Tensor t) { return Tensors{t.mul_(x) * 2}; }},
    {"div_", [](const at::Tensor& x, at::Tensor t) { return Tensors{t.div_(t.sum()) * x}; }},
    {"clamp_", [](const at::Tensor& x, at::Tensor t) { return Tensors{t.clamp_(0, 3) * x}; }},
    {"index_put_",
     [](const at::Tensor& x, at::Tensor t) {
       t.index_put_({torch::tensor({1})}, x);
       return Tensors{t * 2};
     }},
    {"index_add_",
     [](const at::Tensor& x, at::Tensor t) {
       t.index_add_(0, torch::tensor({1, 0}), x.expand({2, 3}));
       return Tensors{t * 2};
     }},
    {"masked_fill_",
     [](const at::Tensor& x, at::Tensor t) { return Tensors{t.masked_fill_(x > 4, 9).exp() * x}; }},
    {"an out= argument that accumulates",
     [](const at::Tensor& x, at::Tensor t) {
       at::addcmul_out(t, t, x, x);
       return Tensors{t + 1};
     }},
};

const std::vector<Use> kPartlyWritten = {
    {"copy_ into a row",
     [](const at::Tensor& x, at::Tensor t) {
       t[1].copy_(x);
       return Tensors{t.sum(0) * 2};
     }},
    {"add_ to a row",
     [](const at::Tensor& x, at::Tensor t) {
       t[0].add_(x);
       return Tensors{t * 2};
     }},
    {"zero_ of a column",
     [](const at::Tensor& x, at::Tensor t) {
       t.select(1, 2).zero_();
       return Tensors{t * x};
     }},
    {"out= into a row",
     [](const at::Tensor& x, at::Tensor t) {
       at::Tensor row = t[1];
       at::sin_out(row, x);
       return Tensors{t + x};
     }},
    {"fill_ of a row, read through the other",
     [](const at::Tensor& x, at::Tensor t) {
       t[0].fill_(7);
       return Tensors{t[1] * x};
     }},
    {"copy_ through a transposed view",
     [](const at::Tensor& x, at::Tensor t) {
       t.t().slice(0, 0, 1).copy_(x.slice(0, 0, 2));
       return Tensors{t * x, t.t().contiguous()};
     }},
    {"copy_ over the whole",
     [](const at::Tensor& x, at::Tensor t) {
       const at::Tensor before = t * 1;
       t.copy_(x.expand({2, 3}));
       return Tensors{before + t};
     }},
};

const std::vector<Use> kParts = {
    {"rows", [](const at::Tensor& x, at::Tensor t) { return Tensors{(x - t[0]) / t[1]}; }},
    {"unbind",
     [](const at::Tensor& x, at::Tensor t) {
       const auto rows = t.unbind(0);
       return Tensors{(x - rows[1]) * rows[0]};
     }},
    {"split",
     [](const at::Tensor& x, at::Tensor t) {
       const auto columns = t.split(2, 1);
       return Tensors{columns[1] * x.sum() + columns[0].sum()};
     }},
    {"narrow",
     [](const at::Tensor& x, at::Tensor t) { return Tensors{t.narrow(1, 1, 1) * x + t.narrow(1, 0, 1)}; }},
    {"select",
     [](const at::Tensor& x, at::Tensor t) { return Tensors{x * t.select(1, 2)[0] + t.select(1, 0)[1]}; }},
    {"chunk",
     [](const at::Tensor& x, at::Tensor t) {
       const auto rows = t.chunk(2);
       return Tensors{x * rows[0], rows[1] - x};
     }},
    {"parts that overlap",
     [](const at::Tensor& x, at::Tensor t) {
       const at::Tensor flat = t.view({-1});
       return Tensors{x * flat.slice(0, 0, 3) + flat.slice(0, 2, 5) * flat.as_strided({3}, {2}, 1)};
     }},
    {"a part, and later the whole",
     [](const at::Tensor& x, at::Tensor t) {
       const at::Tensor y = x * t[1];
       return Tensors{y + t, t.t().mm(t)};
     }},
    {"two results of one table",
     [](const at::Tensor& x, at::Tensor t) { return Tensors{x * 2, t[0], t[1]}; }},
    {"the table and a part of it as results",
     [](const at::Tensor& x, at::Tensor t) { return Tensors{x * t[0], t.select(1, 1), t}; }},
};

void expect_all_like_eager(const std::vector<Use>& uses) {
  const auto inputs = [](int call) { return Tensors{at::arange(1, 4).mul(call + 1).to(at::kFloat)}; };
  const at::Tensor w = at::tensor({0.5F, 2.0F, -1.0F}).requires_grad_();
  for (const Filler& filler : kFillers) {
    for (const Use& use : uses) {
      for (const bool has_gradients : {false, true}) {
        SCOPED_TRACE(std::string(filler.name) + ", " + use.name + (has_gradients ? ", with gradients" : ""));
        const Body body = [&](const Tensors& in) {
          Tensors results = use.run(in[0], filler.make());
          if (has_gradients && results[0].size(-1) == 3) results[0] = results[0] * w;
          return results;
        };
        const at::AutoGradMode mode(has_gradients);
        expect_like_eager(body, inputs, {w});
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(UninitializedTest, WhatCppWroteIsThereForAnOperatorThatWorksInPlace) {
  expect_all_like_eager(kInPlace);
}

TEST(UninitializedTest, WhatCppWroteStaysBesideAPartThatAnOperatorWrites) {
  expect_all_like_eager(kPartlyWritten);
}

TEST(UninitializedTest, EachPartOfATableHasWhatCppWroteThere) {
  expect_all_like_eager(kParts);
}

TEST(UninitializedTest, TablesOfIndicesAndMasksAreReadInParts) {
  const auto inputs = [](int call) { return Tensors{at::arange(3).add(call).to(at::kFloat)}; };
  const at::NoGradGuard no_grad;
  expect_like_eager(
      [](const Tensors& in) {
        const at::Tensor t = torch::tensor(std::vector<std::int64_t>{2, 0, 1, 1, 2, 0}).view({2, 3});
        return Tensors{in[0].index_select(0, t[0]) - in[0].gather(0, t[1])};
      },
      inputs);
  expect_like_eager(
      [](const Tensors& in) {
        at::Tensor t = at::empty({2, 3}, at::kBool);
        std::copy_n(std::vector<int>{1, 0, 0, 0, 1, 1}.begin(), 6, t.data_ptr<bool>());
        const auto rows = t.unbind(0);
        return Tensors{at::where(rows[0], in[0], -in[0]),
                       at::where(rows[1].logical_not_(), in[0], in[0] * 3)};
      },
      inputs);
  expect_like_eager(
      [](const Tensors& in) {
        at::Tensor t = torch::tensor(std::vector<int>{2, 0, 1, 1, 2, 0}, at::kInt).view({2, 3});
        t[0].add_(t[1]);
        return Tensors{in[0] * t};
      },
      inputs);
  expect_like_eager(
      [](const Tensors& in) {
        const at::Tensor bits = torch::tensor(std::vector<float>{1, 2, 3, 4, 5, 6});
        return Tensors{bits.view(at::kInt).slice(0, 3, 6) + 1, in[0] * bits.slice(0, 0, 3)};
      },
      inputs);
}

// `zeros` has contents of its own, so that it is not uninitialized; C++ writes to it all the same.
TEST(UninitializedTest, WhatCppWroteIntoZerosAndOnesIsThereOrTheFunctionStaysEager) {
  const at::NoGradGuard no_grad;
  const auto inputs = [](int call) { return Tensors{at::arange(3).add(call).to(at::kFloat)}; };
  for (const bool is_read_in_parts : {false, true}) {
    for (const auto& make : std::vector<std::function<at::Tensor()>>{
             [] { return at::zeros({2, 3}); }, [] { return at::ones({2, 3}); },
             [] { return at::full({2, 3}, 4.0); },
             [] { return at::arange(6.0).to(at::kFloat).view({2, 3}); }}) {
      expect_like_eager(
          [&](const Tensors& in) {
            at::Tensor t = make();
            fill_row(t, 1);
            return is_read_in_parts ? Tensors{in[0] * t[1] + t[0]} : Tensors{t.add_(in[0]) * 2};
          },
          inputs);
    }
  }
}

// Each part of `run_on_devices` runs where it says; what it writes is on no tape but the caller's.
template <typename Run>
void expect_writes_of_threads_are_kept(const Run& run_on_another) {
  const at::NoGradGuard no_grad;
  const auto inputs = [](int call) { return Tensors{at::arange(1, 4).add(call).to(at::kFloat)}; };
  const auto make_out = std::vector<std::function<at::Tensor()>>{
      [] { return at::zeros({2, 3}); }, [] { return at::empty({2, 3}); },
      [] { return torch::tensor(kNumbers).view({2, 3}); }};
  for (const auto& make : make_out) {
    expect_like_eager(
        [&](const Tensors& in) {
          at::Tensor out = make();
          run_on_another([&] { out[1].copy_(in[0] * 2); });
          out[0].copy_(in[0] + 1);
          return Tensors{out.mul(1)};
        },
        inputs);
    expect_like_eager(
        [&](const Tensors& in) {
          at::Tensor out = make();
          out.copy_(in[0].expand({2, 3}));
          run_on_another([&] { out[1].mul_(3); });
          return Tensors{in[0] * 2, out};
        },
        inputs);
  }
  expect_like_eager(  // an input
      [&](const Tensors& in) {
        run_on_another([&] { at::Tensor(in[0]).add_(1); });
        return Tensors{in[0] * 2};
      },
      inputs);
  at::Tensor ours = at::zeros({3}), theirs = at::zeros({3});  // a captured tensor
  const auto add_to = [&](at::Tensor state) {
    return [&run_on_another, state](const at::Tensor& x) mutable {
      run_on_another([&] { state.add_(x); });
      return state * 2;
    };
  };
  auto eager = add_to(ours);
  Function fast([scripted = add_to(theirs)](const Tensors& in) mutable { return Tensors{scripted(in[0])}; },
                ScriptOptions().min_operators(0));
  for (int call = 0; call < 10; ++call) {
    const at::Tensor x = at::full({3}, call + 1.0);
    EXPECT_TRUE(test::same_bits(eager(x), fast({x})[0])) << call << fast.explain();
  }
}

// Autograd counts one write of such an operator for each argument that is written to, whatever else it reads.
TEST(UninitializedTest, OperatorsThatReadWhatTheyWriteAreNobodyElse) {
  const std::vector<std::function<void(const at::Tensor& t, const at::Tensor& x)>> uses = {
      [](const at::Tensor& t, const at::Tensor& /*x*/) { t[0].copy_(t[1]); },
      [](const at::Tensor& t, const at::Tensor& /*x*/) { at::Tensor(t).mul_(t); },
      [](const at::Tensor& t, const at::Tensor& x) { t[0].addcmul_(t[1], t[1]).add_(x); },
      [](const at::Tensor& t, const at::Tensor& x) {
        at::Tensor row = t[1];
        at::add_out(row, t[0], x);
      },
      [](const at::Tensor& t, const at::Tensor& x) { at::_foreach_add_({t[0], t[1]}, {t[1] * 2, x}); },
      [](const at::Tensor& t, const at::Tensor& /*x*/) {
        at::Tensor values = t[0], indices = at::zeros({3}, at::kLong);
        at::cummax_out(values, indices, t[1], 0);
      },
      [](const at::Tensor& t, const at::Tensor& x) {
        at::Tensor(t).copy_(at::_pad_circular(x.view({1, 3}), {1, 2}).view({2, 3}));
      },
  };
  for (std::size_t i = 0; i < uses.size(); ++i) {
    const std::string explained = expect_like_eager(
        [&](const Tensors& in) {
          const at::NoGradGuard no_grad;
          const at::Tensor t = in[0].repeat({2, 1});
          uses[i](t, in[0]);
          uses[i](t, in[0] * 2);
          return Tensors{t};
        },
        [](int call) { return Tensors{at::arange(1, 4).add(call).to(at::kFloat)}; });
    EXPECT_NE(explained.find("program: "), std::string::npos) << i << explained;
  }
}

TEST(UninitializedTest, WritesOfAThreadOfTheFunctionAreKept) {
  expect_writes_of_threads_are_kept([](const std::function<void()>& part) {
    std::thread thread([&] {
      const at::NoGradGuard no_grad;
      part();
    });
    thread.join();
  });
}

TEST(UninitializedTest, WritesOfAnAsynchronousTaskAreKept) {
  expect_writes_of_threads_are_kept([](const std::function<void()>& part) {
    std::async(std::launch::async, [&] {
      const at::NoGradGuard no_grad;
      part();
    }).get();
  });
}

// LibTorch computes with two threads, until the end of the scope.
class TwoThreads {
 public:
  TwoThreads() : before_(at::get_num_threads()) { at::set_num_threads(2); }
  ~TwoThreads() { at::set_num_threads(before_); }
  TwoThreads(const TwoThreads&) = delete;
  TwoThreads& operator=(const TwoThreads&) = delete;

 private:
  int before_;
};

// By core::parallel_for: at::parallel_for runs on the caller alone in code compiled without OpenMP.
TEST(UninitializedTest, WritesOfAThreadOfLibTorchsPoolAreKept) {
  const TwoThreads threads;
  expect_writes_of_threads_are_kept([](const std::function<void()>& part) {
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<bool> is_taken{false};
    core::parallel_for(2, 1, [&](std::int64_t, std::int64_t) {
      if (std::this_thread::get_id() != caller) {
        if (is_taken.exchange(true)) return;
        const at::NoGradGuard no_grad;
        part();
        return;
      }
      const auto mark_eager = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (!is_taken.load() && std::chrono::steady_clock::now() < mark_eager) std::this_thread::yield();
    });
    EXPECT_TRUE(is_taken.load()) << "no other thread took part";
  });
}

// Of a thread of the function's own: no operator of the recording thread shows it.
TEST(UninitializedTest, WritesOfAThreadToWhatIsCapturedAreKept) {
  for (const bool needs_gradient : {false, true}) {
    for (const bool is_first : {false, true}) {
      const auto run = [=](bool is_scripted) {
        const at::Tensor state = at::ones({3}).requires_grad_(needs_gradient);
        const auto fn = [=](const at::Tensor& x) {
          const auto write = [&] {
            std::thread([&] {
              const at::NoGradGuard no_grad;
              state.detach().mul_(0.75);
            }).join();
          };
          if (is_first) write();
          at::Tensor y = (x * state.detach()).exp() * 2;
          if (!is_first) write();
          return y;
        };
        auto fast = script(fn);
        Tensors seen;
        for (int call = 0; call < 12; ++call) {
          const at::Tensor x = at::full({3}, 0.1 * call);
          seen.push_back(is_scripted ? fast(x) : fn(x));
          seen.push_back(state.detach().clone());
        }
        EXPECT_TRUE(!is_scripted || contains(fast.explain(), "was changed during the call"))
            << fast.explain();
        return seen;
      };
      EXPECT_TRUE(test::same_bits(run(false), run(true))) << needs_gradient << is_first;
    }
  }
}

// Others train the same weights: the function's own operators are replayed.
TEST(UninitializedTest, WritesOfOtherThreadsToWhatIsCapturedAreAllowedWithoutVerification) {
  const at::Tensor weight = at::ones({3});
  auto fast = script(
      [&](const at::Tensor& x) {
        const at::Tensor y = (x * weight).exp() * 2;
        std::thread([&] { at::Tensor(weight).add_(0); }).join();
        return y;
      },
      ScriptOptions().verify(false));
  for (int call = 0; call < 5; ++call) fast(at::ones({3}));
  EXPECT_TRUE(contains(fast.explain(), "program: ")) << fast.explain();
}

}  // namespace
}  // namespace cohort::script
