// ops::nms beside the two ways that one would write it without: a loop over boxes in C++, each row read anew,
// and LibTorch's operators (one mask of overlaps for each box that is kept). In turns in one process. Run:
// OMP_NUM_THREADS=1 ops_nms [rounds, 9] [cpu: count CPU time]
#include "cohort/ops/nms.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cohort/bench/compare.h"

namespace {

namespace bench = cohort::bench;
constexpr double kThreshold = 0.5;

at::Tensor plain_loop(const at::Tensor& boxes, const at::Tensor& scores) {
  const at::Tensor order = std::get<1>(scores.sort(true, 0, true));
  const auto b = boxes.accessor<float, 2>();
  const auto o = order.accessor<std::int64_t, 1>();
  const std::int64_t count = boxes.size(0);
  std::vector<char> suppressed(static_cast<std::size_t>(count), 0);
  std::vector<std::int64_t> kept;
  for (std::int64_t a = 0; a < count; ++a) {
    const std::int64_t i = o[a];
    if (suppressed[static_cast<std::size_t>(i)] != 0) continue;
    kept.push_back(i);
    const float area = (b[i][2] - b[i][0]) * (b[i][3] - b[i][1]);
    for (std::int64_t c = a + 1; c < count; ++c) {
      const std::int64_t j = o[c];
      if (suppressed[static_cast<std::size_t>(j)] != 0) continue;
      const float width = std::max(0.0F, std::min(b[i][2], b[j][2]) - std::max(b[i][0], b[j][0]));
      const float height = std::max(0.0F, std::min(b[i][3], b[j][3]) - std::max(b[i][1], b[j][1]));
      const float both = width * height;
      const float overlap = both / (area + (b[j][2] - b[j][0]) * (b[j][3] - b[j][1]) - both);
      if (static_cast<double>(overlap) > kThreshold) suppressed[static_cast<std::size_t>(j)] = 1;
    }
  }
  return at::tensor(kept);
}

at::Tensor in_operators(const at::Tensor& boxes, const at::Tensor& scores) {
  at::Tensor order = std::get<1>(scores.sort(true, 0, true));
  std::vector<at::Tensor> kept;
  while (order.numel() > 0) {
    kept.push_back(order.narrow(0, 0, 1));
    const at::Tensor box = boxes.index_select(0, kept.back()), rest = boxes.index_select(0, order);
    const at::Tensor low = at::maximum(box.narrow(1, 0, 2), rest.narrow(1, 0, 2));
    const at::Tensor high = at::minimum(box.narrow(1, 2, 2), rest.narrow(1, 2, 2));
    const at::Tensor both = (high - low).clamp_min(0).prod(1);
    const auto area = [](const at::Tensor& some) {
      return (some.narrow(1, 2, 2) - some.narrow(1, 0, 2)).prod(1);
    };
    at::Tensor keep = both / (area(box) + area(rest) - both) <= kThreshold;
    keep[0] = false;
    order = order.masked_select(keep);
  }
  return kept.empty() ? at::empty({0}, at::kLong) : at::cat(kept);
}

/// Boxes as a detector gives them: clusters around objects.
std::pair<at::Tensor, at::Tensor> detections(std::int64_t count) {
  at::manual_seed(1);
  const std::int64_t objects = std::max<std::int64_t>(1, count / 20);
  const at::Tensor centre = (at::rand({objects, 2}) * 600).index_select(0, at::randint(objects, {count}));
  const at::Tensor corner = centre + at::randn({count, 2}) * 6, size = 30 + at::rand({count, 2}) * 20;
  return {at::cat({corner, corner + size}, 1), at::rand({count})};
}

template <typename Fn>
bench::Variant variant(const char* name, Fn way) {
  return {name, [way](const bench::Shape& shape) {
            const auto [boxes, scores] = detections(shape.front());
            return [=, boxes = boxes, scores = scores] { bench::keep(way(boxes, scores)); };
          }};
}

}  // namespace

int main(int argc, char** argv) {
  for (const std::int64_t count : {100, 1000, 5000}) {
    const auto [boxes, scores] = detections(count);
    const at::Tensor kept = cohort::ops::nms(boxes, scores, kThreshold);
    if (!at::equal(kept, plain_loop(boxes, scores)) || !at::equal(kept, in_operators(boxes, scores))) {
      std::fprintf(stderr, "the ways differ on %lld boxes\n", static_cast<long long>(count));
      return 1;
    }
    std::printf("%lld boxes, %lld kept\n", static_cast<long long>(count),
                static_cast<long long>(kept.numel()));
  }
  const auto figures = bench::compare(
      {variant("a loop over boxes", plain_loop), variant("LibTorch's operators", in_operators),
       variant("ops::nms",
               [](const at::Tensor& b, const at::Tensor& s) { return cohort::ops::nms(b, s, kThreshold); })},
      bench::CompareOptions()
          .shapes({{100}, {1000}, {5000}})
          .timeit(bench::TimeitOptions()
                      .rounds(argc > 1 ? std::atoi(argv[1]) : 9)
                      .clock(argc > 2 ? bench::cpu_clock() : bench::Clock())));
  std::printf("\n%s", figures.markdown().c_str());
}
