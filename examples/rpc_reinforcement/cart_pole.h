#pragma once

#include <torch/torch.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <random>

/// In [0, 1), the same on each machine.
inline double uniform(std::mt19937& random) {
  return static_cast<double>(random()) / 4294967296.0;
}

/// A cart with a pole on it, which a force pushes to the left or to the right.
/// Source: Barto, Sutton and Anderson, "Neuronlike Adaptive Elements That Can Solve Difficult Learning
/// Control Problems", 1983.
class CartPole {
 public:
  static constexpr std::int64_t kMaxSteps = 200;
  explicit CartPole(std::int64_t seed) : random_(static_cast<std::uint32_t>(seed)) {}

  /// Plays until the pole falls, the cart is too far away, or kMaxSteps are over. `select(state)`: whether
  /// to push to the right. `report(reward)` is called after each step.
  template <typename Select, typename Report>
  void play(const Select& select, const Report& report) {
    for (double& value : state_) value = 0.1 * uniform(random_) - 0.05;
    bool stands = true;
    for (std::int64_t step = 0; stands && step < kMaxSteps; ++step) {
      stands = push(select(torch::tensor(at::ArrayRef<double>(state_), at::kFloat)));
      report(1.0);
    }
  }

 private:
  // A step of 20 ms.
  bool push(bool right) {
    auto& [x, speed, angle, spin] = state_;
    const double sine = std::sin(angle), cosine = std::cos(angle);
    const double pushed = ((right ? 10 : -10) + 0.05 * spin * spin * sine) / 1.1;
    const double spin_up = (9.8 * sine - cosine * pushed) / (0.5 * (4. / 3 - 0.1 * cosine * cosine / 1.1));
    const double speed_up = pushed - 0.05 * spin_up * cosine / 1.1;
    x += 0.02 * speed;
    speed += 0.02 * speed_up;
    angle += 0.02 * spin;
    spin += 0.02 * spin_up;
    return std::abs(x) < 2.4 && std::abs(angle) < 0.21;
  }

  std::mt19937 random_;
  std::array<double, 4> state_{};  // place, speed, angle, speed of the angle
};
